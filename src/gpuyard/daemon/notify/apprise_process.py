"""Sends one message through Apprise: JSON with `url`, `title` and `body` on standard input; what went wrong is the last
line of what it says. Nothing but its parent hears that, which takes the URL's secrets out of it."""

import json
import logging
import sys

_log = logging.getLogger(__name__)


def main() -> int:
    asked = json.load(sys.stdin)
    logging.basicConfig(stream=sys.stdout, level=logging.WARNING, format="%(message)s")
    import apprise

    service = apprise.Apprise()
    if not service.add(asked["url"]):
        _log.error("Apprise cannot read this URL")
        return 1
    is_sent = service.notify(body=asked["body"], title=asked["title"], body_format=apprise.NotifyFormat.TEXT)
    return 0 if is_sent else 1


if __name__ == "__main__":
    sys.exit(main())
