"""Somebody else's redis-py pipeline: may an enqueue travel in it?"""

from __future__ import annotations

from typing import Any

from holdfast.errors import OptionError
from holdfast.storage.redis.topology import Servers


def pipeline_for(transaction: object, servers: Servers) -> Any:
    """The pipeline, if commands to these servers can be put into it."""
    from redis.asyncio.client import Pipeline
    from redis.client import Pipeline as BlockingPipeline

    if not isinstance(transaction, Pipeline | BlockingPipeline):
        kind = type(transaction)
        raise OptionError(
            f"{kind.__module__}.{kind.__qualname__} is no transaction that a job could be part of on {servers.name}:"
            " pass a pipeline of redis.Redis or redis.asyncio.Redis"
        )
    if servers.clustered:
        raise OptionError(
            f"{servers.name} is a cluster, where a transaction ends at a slot's edge: a job cannot be part of yours"
        )
    database = int(transaction.connection_pool.connection_kwargs.get("db") or 0)
    if database != servers.database:
        raise OptionError(
            f"the pipeline is on database {database}, the jobs are in database {servers.database} of {servers.name}"
        )
    if transaction.watching and not transaction.explicit_transaction:
        raise OptionError("the pipeline watches keys and would send the command at once: call its multi() first")
    return transaction
