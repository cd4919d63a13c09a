"""Where a server of a test is found."""


class OnLoopback:
    """A server on a port of this machine."""

    port: int

    @property
    def address(self) -> str:
        """Base of HTTP URLs."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """Address of the socket."""
        return f"ws://127.0.0.1:{self.port}/v1/realtime/video"
