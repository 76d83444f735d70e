"""A running gateway, as the commands that watch one see it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

BaseUrl = Annotated[str, typer.Option(help="A gateway")]
ApiKey = Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY")]
LOCAL = "http://127.0.0.1:8000"


class Api:
    """Answers of one gateway. Raises ValueError with what it refuses, ConnectionError where none answers."""

    def __init__(self, base_url: str, api_key: str | None = None, timeout_s: float = 10.0) -> None:
        self.base_url = base_url.removesuffix("/").removesuffix("/v1")
        import httpx

        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(base_url=self.base_url, headers=headers, timeout=timeout_s)

    def json(self, path: str) -> Any:
        return self._ask("GET", path).json()

    def content(self, path: str) -> bytes:
        return self._ask("GET", path).content

    def post(self, path: str, body: dict[str, Any], timeout_s: float) -> Any:
        return self._ask("POST", path, json=body, timeout=timeout_s).json()

    def _ask(self, method: str, path: str, **options: Any) -> Any:
        import httpx

        try:
            answer = self._client.request(method, path, **options)
        except httpx.HTTPError as error:
            raise ConnectionError(f"no gateway answers at {self.base_url}: {error or repr(error)}") from None
        if answer.status_code != 200:
            try:
                message = answer.json()["error"]["message"]
            except (ValueError, KeyError, TypeError):
                message = f"HTTP {answer.status_code} for {path}"
            raise ValueError(message)
        return answer
