"""What the tests of the deployments share."""

import socket


class Check:
    """Prints whether something holds, and counts what does not."""

    failed = 0

    def __call__(self, holds, text):
        print(f"{'ok' if holds else 'FAILED'}: {text}", flush=True)
        self.failed += not holds


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
