"""API key and admin key: who may call what. Each case is a server of its own."""

from __future__ import annotations

import pytest
from conformance_servers import http_client
from engine_calls import generate_body

pytestmark = pytest.mark.slow

API, ADMIN = "an-api-key", "an-admin-key"
CALLS = {
    "probe": [("GET", "/health", None), ("GET", "/ready", None)],
    "ordinary": [
        ("POST", "/generate", generate_body(new=1)),
        ("GET", "/model_info", None),
        ("GET", "/server_info", None),
        ("GET", "/v1/loads", None),
    ],
    "control": [
        ("POST", "/abort_request", {"rid": "nobody"}),
        ("POST", "/pause_generation", {"mode": "retract"}),
        ("POST", "/continue_generation", {}),
        ("POST", "/flush_cache", {}),
        ("POST", "/begin_weight_update", {}),
        ("POST", "/end_weight_update", {}),
        ("POST", "/weights_checker", {"action": "checksum"}),
        ("POST", "/update_weight_version", {"new_version": "0"}),
    ],
}
# Which keys open what: by the keys a server has, the kind of call, and what is sent with it.
CASES = [
    (API, None, {"probe": {"", API, ADMIN}, "ordinary": {API}, "control": {API}}),
    (None, ADMIN, {"probe": {"", API, ADMIN}, "ordinary": {"", API, ADMIN}, "control": {ADMIN}}),
    (API, ADMIN, {"probe": {"", API, ADMIN}, "ordinary": {API}, "control": {ADMIN}}),
]


@pytest.mark.parametrize(("api_key", "admin_key", "opens"), CASES, ids=["api key", "admin key", "both"])
def test_keys_open_what_they_are_for(second_server, api_key, admin_key, opens):
    with second_server(api_key=api_key, admin_key=admin_key) as url, http_client(url) as http:
        for kind, calls in CALLS.items():
            for method, path, body in calls:
                for key in ("", API, ADMIN):
                    headers = {"authorization": f"Bearer {key}"} if key else {}
                    reply = http.request(method, path, json=body, headers=headers)
                    if key in opens[kind]:
                        assert reply.status_code == 200, (path, key, reply.text)
                    else:
                        assert (reply.status_code, reply.json()) == (401, {"error": "Unauthorized"}), (path, key)
        for header in (f"Basic {API}", API, f"Bearer {API}x", "Bearer"):
            allowed = api_key is None
            assert (http.get("/model_info", headers={"authorization": header}).status_code == 200) is allowed
