"""The ring against one played step by step, merges against masks that are looked at, and the exchange of heads."""

import pytest

from tests.plan.questions import question
from tightfit.jobs.layout import Layout
from tightfit.jobs.levers import Levers
from tightfit.plan.cost import Costs
from tightfit.plan.seconds.context import MERGED_SHARE, Ring, exchanged_numbers, head_exchange_s
from tightfit.plan.seconds.groups import CALL_S, Group
from tightfit.plan.seconds.passes import CONTENTION

BYTES_S = 3e12


def ring(ranks: int, *, send_s: float = 0.0, queries: float = 0.0, keys: float = 0.0) -> Ring:
    """Gradients are twice as long on their way: float32 where keys and values are 16 bits."""
    return Ring(
        ranks=ranks,
        send_s=send_s,
        gradient_send_s=2 * send_s,
        query_numbers=queries,
        key_numbers=keys,
        bytes_s=BYTES_S,
    )


def played_s(ranks: int, hand_on_s: float, attention_s: float) -> float:
    """A piece of attention at a time, each while the next keys arrive; what that takes longer than attention."""
    now = arrived = 0.0
    for _ in range(ranks):
        began = max(now, arrived)
        now, arrived = began + attention_s / ranks, began + hand_on_s
    return now - attention_s


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("hand_on_s", [1e-5, 1e-3, 1e-2])
def test_hand_ons_hide_behind_all_but_one_piece_of_attention(ranks: int, hand_on_s: float) -> None:
    attention_s = 4e-3
    found = ring(ranks, send_s=hand_on_s)
    for seconds, payloads in ((found.forward_s(attention_s), 1), (found.backward_s(attention_s), 3)):
        alone_s = played_s(ranks, payloads * hand_on_s, attention_s)
        hidden_s = (ranks - 1) * payloads * hand_on_s - alone_s
        assert seconds == pytest.approx(alone_s + CONTENTION * hidden_s, abs=1e-12)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_three_quarters_of_queries_and_of_keys_are_concerned(ranks: int) -> None:
    """Rank r has pieces r and 2c − 1 − r of 2c; a query's piece sees the keys of pieces that are not after it."""
    own = [(rank, 2 * ranks - 1 - rank) for rank in range(ranks)]
    pairs = [(mine, theirs) for mine in own for theirs in own if mine is not theirs]
    queries = sum(any(key <= query for key in theirs) for mine, theirs in pairs for query in mine)
    keys = sum(any(key <= query for query in mine) for mine, theirs in pairs for key in theirs)
    assert queries / (2 * len(pairs)) == keys / (2 * len(pairs)) == MERGED_SHARE


def test_merges_are_counted_and_one_rank_has_none() -> None:
    assert ring(1, queries=1e9, keys=1e9).backward_s(1.0) == 0
    four = ring(4, queries=1e6, keys=5e5)
    assert four.forward_s(1.0) == pytest.approx(3 * 0.75 * 1e6 * (4 + 4 + 2) / BYTES_S)
    assert four.backward_s(1.0) == pytest.approx(1.5 * four.forward_s(1.0))


def test_context_ranks_are_never_free() -> None:
    """Where links are fast enough for everything to hide, too."""
    asked = question("llama-3.1-8b", "8xH100-80GB", 32768, 8)
    costs = Costs(asked.workload, asked.machine)
    alone = costs.step(Layout(data=8, zero=1), Levers())
    assert alone.context_s == 0
    for ring_ranks in (1, 2, 8):
        split = costs.step(Layout(context=8, ring=ring_ranks, zero=1), Levers())
        assert 0 < split.context_s < 0.2 * split.compute_s


def test_an_exchange_sends_all_but_its_own_part_and_copies_everything_once() -> None:
    """Of Llama-3.1-8B, 4096 queries and outputs and 2 × 1024 keys and values a token, 2 bytes each."""
    asked, ranks, tokens = question("llama-3.1-8b", "8xH100-80GB", 32768, 8), 4, 8192
    qkv_bytes, out_bytes = 2 * tokens * (4096 + 2 * 1024), 2 * tokens * 4096
    group = Group(asked.machine, stride=1, size=ranks)
    calls_s = 2 * (CALL_S + group.far_s)
    sent_s = (qkv_bytes + out_bytes) * (ranks - 1) / ranks / group.intra_bytes_s
    costs = Costs(asked.workload, asked.machine)
    copied_s = 2 * (qkv_bytes + out_bytes) / costs.ctx.rates.bytes_s
    exchange_s = head_exchange_s(costs.ctx, Layout(context=ranks), tokens)
    assert exchange_s == pytest.approx(calls_s + sent_s + copied_s)


def test_few_key_heads_are_sent_repeatedly() -> None:
    """Sixteen ranks get one of eight key heads each: as many bytes as sixteen heads would be."""
    workload = question("llama-3.1-8b", "2x8xH100-80GB", 32768, 8).workload
    few, enough = (exchanged_numbers(workload, Layout(context=c), 32768 / c)[1] * c for c in (16, 8))
    assert few == 2 * enough
