"""Who may call what: SGLang's rules of its API key and its admin key.

                  no keys   API key only   admin key only   both
/health, /ready   anybody   anybody        anybody          anybody
control calls     anybody   API key        admin key        admin key
everything else   anybody   API key        anybody          API key
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Set

from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["Access"]

_OPEN = ("/health", "/ready")
_REFUSAL = json.dumps({"error": "Unauthorized"}).encode()


class Access:
    """ASGI middleware that answers 401 to a call without the key it needs.

    Args:
        control: the paths of control calls.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None, admin_key: str | None, control: Set[str]) -> None:
        self._app = app
        self._api_key = api_key
        self._admin_key = admin_key
        self._control = control

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a call through, or refuse it."""
        if scope["type"] != "http" or self._allowed(scope):
            await self._app(scope, receive, send)
            return
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(_REFUSAL)).encode())]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": _REFUSAL})

    def _allowed(self, scope: Scope) -> bool:
        path: str = scope["path"]
        needed = self._admin_key or self._api_key if path in self._control else self._api_key
        if needed is None or path.startswith(_OPEN):
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, token = given.partition(b" ")
        return kind.lower() == b"bearer" and secrets.compare_digest(token, needed.encode())
