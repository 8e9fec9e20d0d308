"""The contract's scenarios on distributing requests over rollout servers."""

import threading
import time

import pytest

from coordexp.engine.server_backend import in_flight
from coordexp.errors import ConfigError
from coordexp.rollouts.chunking import Call, chunk_size, plan_calls, plan_posts, server_slots


@pytest.mark.scenario("vLLM server mode fails fast when cap is infeasible")
def test_more_trainer_ranks_than_decode_slots():
    with pytest.raises(ConfigError) as error:
        chunk_size(decode_batch_size=1, server_world_sizes=[2], learner_world_size=4)
    message = str(error.value)
    assert "increase the rollout servers' world size" in message
    assert "reduce the learner's world size" in message
    assert "increase rollout_matching.decode_batch_size to at least 2" in message
    assert chunk_size(decode_batch_size=2, server_world_sizes=[2], learner_world_size=4) == 1


@pytest.mark.scenario("Multi-server request distribution is deterministic")
def test_requests_go_to_the_same_servers_and_answers_keep_their_order():
    slots = server_slots(decode_batch_size=3, server_world_sizes=[2, 1, 1], learner_world_size=1, rank=0)
    first, second = plan_calls([11], slots), plan_calls([11], slots)
    assert first == second == [[Call(0, 0, range(0, 6)), Call(1, 0, range(6, 9)), Call(2, 0, range(9, 11))]]
    requests = [f"request {i}" for i in range(11)]
    for slow in range(3):  # whichever server answers last
        answered = {}
        others = threading.Barrier(3)

        def ask(post, slow=slow, others=others):
            others.wait(20)  # all servers have their request
            time.sleep(0.2 if post.server == slow else 0)
            return [requests[i].upper() for i in post.calls[0].indices]

        for post, replies in in_flight(plan_posts(first, ()), slots, ask, watch=lambda servers: None, watch_s=60):
            answered |= dict(zip(post.calls[0].indices, replies, strict=True))
        assert [answered[i] for i in range(11)] == [request.upper() for request in requests]
