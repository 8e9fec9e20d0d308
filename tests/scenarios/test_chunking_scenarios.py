"""The contract's scenarios on distributing requests over rollout servers."""

import pytest

from coordexp.errors import ConfigError
from coordexp.rollouts.chunking import chunk_size, reassemble, split_requests


@pytest.mark.scenario("vLLM server mode fails fast when cap is infeasible")
def test_more_learner_ranks_than_decode_slots():
    with pytest.raises(ConfigError) as error:
        chunk_size(decode_batch_size=1, server_world_sizes=[2], learner_world_size=4)
    message = str(error.value)
    assert "increase the rollout servers' world size" in message
    assert "reduce the learner's world size" in message
    assert "increase rollout_matching.decode_batch_size to at least 2" in message
    assert chunk_size(decode_batch_size=2, server_world_sizes=[2], learner_world_size=4) == 1


@pytest.mark.scenario("Multi-server request distribution is deterministic")
def test_the_same_requests_go_to_the_same_servers_and_come_back_in_order():
    requests = [f"request {i}" for i in range(11)]
    first, second = split_requests(11, [2, 1, 1]), split_requests(11, [2, 1, 1])
    assert first == second == [range(0, 6), range(6, 9), range(9, 11)]
    replies = [[requests[i].upper() for i in chunk] for chunk in first]
    assert reassemble(first, replies) == [request.upper() for request in requests]
