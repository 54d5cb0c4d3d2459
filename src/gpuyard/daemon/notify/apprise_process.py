"""Send one message through Apprise. Reads `url`, `title` and `body` as JSON from standard input.

The last line of output is the error. It may contain secrets of the URL, which the parent process removes.
"""

import json
import logging
import sys

_log = logging.getLogger(__name__)


def main() -> int:
    message = json.load(sys.stdin)
    logging.basicConfig(stream=sys.stdout, level=logging.WARNING, format="%(message)s")
    import apprise

    service = apprise.Apprise()
    if not service.add(message["url"]):
        _log.error("Apprise does not understand this URL")
        return 1
    is_sent = service.notify(body=message["body"], title=message["title"], body_format=apprise.NotifyFormat.TEXT)
    return 0 if is_sent else 1


if __name__ == "__main__":
    sys.exit(main())
