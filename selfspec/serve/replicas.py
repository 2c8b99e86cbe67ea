"""Several copies of a served model by Ray Serve, which starts and replaces them and sends requests to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from selfspec.errors import UnsupportedOptionError

if TYPE_CHECKING:
    from ray.serve import Application

# Longest that a request is finished in when its replica is taken away.
_STOP_SECONDS = 60.0


@dataclass(frozen=True)
class Replicas:
    """A deployment of an application, for Ray Serve. Ray has the queue, the balancer and the health checks.

    A replica that dies takes the requests with it that it was answering: the client gets an error of the connection or
    a 5xx, and sends them again, as OpenAI's client does by itself (`max_retries`). Ray gives them to another replica,
    and starts a new one. Answers that are seeded or greedy come again as they were.

    Attributes:
        build: makes the application in each replica; loads the model there. It is pickled by Ray, so it should be a
            function of an importable module, or refer to nothing large.
        least: replicas that always run.
        most: replicas that run when requests wait.
        requests: that a replica should answer at once; more replicas are started when there are more.
        most_requests: that Ray sends to a replica at once; what exceeds that waits in Ray's own queue.
        resources: of each replica, as Ray's `ray_actor_options`, e.g. {"num_cpus": 4, "num_gpus": 1}.
    """

    build: Callable[[], Any]
    least: int = 1
    most: int = 2
    requests: int = 8
    most_requests: int = 64
    resources: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        whole = all(type(each) is int for each in (self.least, self.most, self.requests, self.most_requests))
        if not whole or not 1 <= self.least <= self.most or not 1 <= self.requests <= self.most_requests:
            raise UnsupportedOptionError(
                "replicas need 1 <= least <= most and 1 <= requests <= most_requests, got "
                f"{self.least!r}, {self.most!r}, {self.requests!r} and {self.most_requests!r}"
            )

    def bound(self) -> Application:
        """Make the application that `ray.serve.run` takes.

        Raises:
            UnsupportedOptionError: Ray Serve is not installed.
        """
        try:
            from ray import serve
        except ImportError as error:
            raise UnsupportedOptionError(
                "replicas are run by Ray Serve, which is not installed: pip install 'selfspec[ray]'"
            ) from error
        deployment = serve.deployment(
            serve.ingress(self.build)(),
            autoscaling_config={
                "min_replicas": self.least,
                "max_replicas": self.most,
                "target_ongoing_requests": self.requests,
            },
            max_ongoing_requests=self.most_requests,
            health_check_period_s=2.0,
            health_check_timeout_s=30.0,
            graceful_shutdown_timeout_s=_STOP_SECONDS,
            ray_actor_options=dict(self.resources or {}),
        )
        return deployment.bind()
