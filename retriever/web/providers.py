"""Web search services: how each is asked, and what it answers.

    provider           key from the environment           results
    SerpApi            SERPAPI_KEY                        answer_box and organic_results: title, link, snippet
    GoogleCse          GOOGLE_API_KEY, GOOGLE_CSE_ID      items: title, link, snippet

Google's Custom Search JSON API is closed to new customers, and to all from 2027 (its overview page, 2026).

What comes from a search service is text of strangers: strings are cut, links that are not http(s) are left out, nothing of it is ever run.

    Refused (retriever.query)
    ├── QuotaExhausted             503     the service, or the limit that was set here, allows no more for now
    └── Unavailable
        └── ProviderFailed         502     the service refused, failed, or answered something else than results

SOURCE: SerpApi's documentation of `engine=google`, "Status and Error Codes" and "Search Errors" (serpapi.com, 2026); Google's "Custom Search JSON
API: cse.list" (developers.google.com/custom-search/v1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from retriever.query import Refused, Unavailable

__all__ = ["PAGE_RESULTS", "PROVIDERS", "GoogleCse", "Provider", "ProviderFailed", "QuotaExhausted", "Result", "SerpApi", "Trouble", "open_provider"]

PAGE_RESULTS = 10  # what both give at once; Google's API gives no more
MAX_TITLE, MAX_SNIPPET, MAX_LINK = 512, 4096, 2048  # characters; real ones are shorter by far


class ProviderFailed(Unavailable):
    """The search service refused, failed, or answered something else than results."""


class QuotaExhausted(Refused):
    """No more searches for now."""

    def __init__(self, reason: str, retry_after_s: int) -> None:
        super().__init__(f"{reason}: try again in {retry_after_s} s", retry_after_s=retry_after_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One result of a search."""

    title: str  # one line; empty where there is none
    url: str
    snippet: str  # empty where there is none


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """What a service says when it gives no results."""

    message: str
    exhausted: bool  # the quota is used up: asking again is of no use for long


class Provider(Protocol):
    """A search service."""

    @property
    def name(self) -> str: ...

    @property
    def url(self) -> str: ...

    @property
    def key_variables(self) -> tuple[str, ...]: ...

    @property
    def secrets(self) -> tuple[str, ...]:
        """Their values, never shown."""
        ...

    def parameters(self, query: str, first: int) -> Mapping[str, str]:
        """Of the request for a page of results, from the `first` (0 is the best)."""
        ...

    def results(self, answer: Mapping[str, Any]) -> list[Result] | None:
        """The results of a page, best first; None where the answer says that the search failed.

        Raises:
            ValueError: it is something else than an answer of this service.
        """
        ...

    def trouble(self, answer: object) -> Trouble:
        """What an answer other than results says."""
        ...


class SerpApi:
    """SerpApi's Google engine. The answer box comes first, where it has a link, as in Search-R1's `serp_search_server.py` (a14dc3a)."""

    name = "serpapi"
    key_variables = ("SERPAPI_KEY",)

    def __init__(self, environment: Mapping[str, str], base_url: str | None) -> None:
        (self._key,) = self.secrets = _keys(self.name, environment, self.key_variables)
        self.url = base_url or "https://serpapi.com/search.json"

    def parameters(self, query: str, first: int) -> Mapping[str, str]:
        more = {"start": str(first)} if first else {}
        return {"engine": "google", "q": query, "num": str(PAGE_RESULTS), "api_key": self._key, **more}

    def results(self, answer: Mapping[str, Any]) -> list[Result] | None:
        metadata = answer.get("search_metadata")
        status = metadata.get("status") if isinstance(metadata, dict) else None
        if "error" in answer and status != "Success":  # with Success it says that nothing was found
            return None
        box = answer.get("answer_box")
        boxes = [{**box, "snippet": box.get("snippet") or box.get("answer")}] if isinstance(box, dict) else []
        return _results([*boxes, *_list(answer, "organic_results")])

    def trouble(self, answer: object) -> Trouble:
        message = answer.get("error") if isinstance(answer, dict) else None
        text = message if isinstance(message, str) else ""
        return Trouble(message=text, exhausted="run out" in text.lower())  # a 429 is this, or too many in an hour: the words tell


class GoogleCse:
    """Google's Custom Search JSON API, as Search-R1's `google_search_server.py` (a14dc3a) asks it, with `--snippet_only`."""

    name = "google"
    key_variables = ("GOOGLE_API_KEY", "GOOGLE_CSE_ID")

    def __init__(self, environment: Mapping[str, str], base_url: str | None) -> None:
        self.secrets = _keys(self.name, environment, self.key_variables)
        self.url = base_url or "https://customsearch.googleapis.com/customsearch/v1"

    def parameters(self, query: str, first: int) -> Mapping[str, str]:
        key, engine = self.secrets
        more = {"start": str(first + 1)} if first else {}
        return {"key": key, "cx": engine, "q": query, "num": str(PAGE_RESULTS), **more}

    def results(self, answer: Mapping[str, Any]) -> list[Result] | None:
        if "error" in answer:
            return None
        return _results(_list(answer, "items"))

    def trouble(self, answer: object) -> Trouble:
        error = answer.get("error") if isinstance(answer, dict) else None
        message = error.get("message") if isinstance(error, dict) else error
        text = message if isinstance(message, str) else ""
        return Trouble(message=text, exhausted="per day" in text.lower() or "daily limit" in text.lower())


PROVIDERS = (SerpApi.name, GoogleCse.name)


def open_provider(name: str, environment: Mapping[str, str], base_url: str | None) -> Provider:
    """The provider of a name, with its key from the environment.

    Args:
        base_url: used instead of the service's own, e.g. of a fake or a gateway.

    Raises:
        ValueError: there is no such provider, its key is not in the environment, or `base_url` is no URL.
    """
    if name not in PROVIDERS:
        raise ValueError(f"provider must be one of {', '.join(PROVIDERS)}, got {name!r}")
    if base_url is not None and not base_url.startswith(("http://", "https://")):
        raise ValueError(f"base_url must begin with http:// or https://, got {base_url!r}")
    provider: Provider = SerpApi(environment, base_url) if name == SerpApi.name else GoogleCse(environment, base_url)
    return provider


def _keys(name: str, environment: Mapping[str, str], variables: Sequence[str]) -> tuple[str, ...]:
    missing = [variable for variable in variables if not environment.get(variable, "").strip()]
    if missing:
        raise ValueError(f"the search service {name} needs {' and '.join(missing)} in the environment")
    return tuple(environment[variable].strip() for variable in variables)


def _list(answer: Mapping[str, Any], name: str) -> list[Any]:
    value = answer.get(name, [])
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list, got {type(value).__name__}")
    return value


def _results(items: Sequence[Any]) -> list[Result]:
    """Those with a link to the web and any text, each link once."""
    found: dict[str, Result] = {}
    for item in items:
        if not isinstance(item, dict):
            continue
        title, url, snippet = _line(item.get("title"), MAX_TITLE), _line(item.get("link"), MAX_LINK + 1), _line(item.get("snippet"), MAX_SNIPPET)
        if url.startswith(("http://", "https://")) and len(url) <= MAX_LINK and (title or snippet):
            found.setdefault(url, Result(title=title, url=url, snippet=snippet))
    return list(found.values())


def _line(value: object, longest: int) -> str:
    """Text on one line, as UTF-8 can carry it; empty where it is no text."""
    text = " ".join(value[: 4 * longest].split()) if isinstance(value, str) else ""  # cut first: it may be megabytes of blanks
    return text[:longest].encode("utf-8", "replace").decode()
