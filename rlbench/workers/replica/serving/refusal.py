"""What the endpoint's gate answers instead of the app."""


class Refusal(Exception):
    """A request that is not handed on: `status` of HTTP and `kind` of error by OpenAI's names."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status, self.kind = status, kind
