"""The operator with a clock two minutes ahead of the cluster's: what it would only do after a minute, it does at once."""

from datetime import datetime, timedelta, tzinfo

from grpo_operator import handlers
from grpo_operator.__main__ import main


class Ahead(datetime):
    """Now is later."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return datetime.now(tz) + timedelta(minutes=2)


handlers.datetime = Ahead  # type: ignore[misc]
main()
