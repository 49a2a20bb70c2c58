"""Episodes on the vLLM inside ranks: each turn is what vLLM samples for the tokens before it, whatever runs beside it.

Also where ranks share an engine, where pushes cut turns, and where evaluations run between two steps.
"""

import pytest
import torch

from support.trainer.scripted_episodes import ENDS


@pytest.mark.vllm
@pytest.mark.parametrize(("world_size", "tensor_parallel", "staleness"), [(1, 1, 0), (2, 2, 2)])
def test_each_turn_is_what_the_engine_samples_for_its_tokens(
    run_program, tiny_model, tmp_path, world_size, tensor_parallel, staleness
):
    run_program("played_episodes.py", world_size, tiny_model, tmp_path / "out.pt", tensor_parallel, staleness)
    episodes = [one for own in torch.load(tmp_path / "out.pt", weights_only=False) for one in own]
    assert len(episodes) == 4 * sum(1 + (rank + step) % 2 for rank in range(world_size) for step in range(3))
    for one in episodes:
        completion, turns = one["completion"], one["turns"]
        sampled = [completion.token_ids[start:stop] for start, stop in turns]
        assert one["again"] in (None, sampled)
        assert max(one["differences"]) < 1e-4
        assert len(one["differences"]) == completion.num_own == sum(map(len, sampled))
        ends = completion.token_ids[-1] in ENDS["stop_token_ids"] and len(sampled[-1]) % 2 == 1
        assert completion.finish_reason == ("stop" if ends else "length")
        assert all(len(turn) % 2 == 0 for turn in sampled[:-1]), "a turn that calls nothing is the last"
        assert completion.episode.prompt_ids is not None
    assert max(one["completion"].episode.num_turns for one in episodes) > 2
    assert sum(one["again"] is not None for one in episodes) >= len(episodes) / 4
    is_cut = any(one["completion"].weight_updates for one in episodes)
    assert is_cut == (staleness > 0)
