"""Every step has a bucket that holds it and is not much larger."""

from __future__ import annotations

from itertools import pairwise

import pytest

from model_zoo.layers.gemm.implementations import BUCKETS
from model_zoo.layers.gemm.swiglu import SIZES
from runtime.cuda_graph.buckets import MAX_MIXED, TILE, Bucket, Buckets, mixed_sizes

SERVERS = [
    (256, 8192), (1, 1), (1, 2048), (5, 24), (1024, 8192), (300, 300), (7, 100), (2500, 4096),
    (8192, 8192),
]  # fmt: skip


def test_products_of_many_rows_are_chosen_for_the_sizes_that_steps_are_padded_to() -> None:
    assert list(SIZES) == [size for size in mixed_sizes() if size > BUCKETS[-1]]


@pytest.mark.parametrize(("rows", "tokens"), SERVERS)
def test_a_step_fits_in_its_bucket_and_the_bucket_in_the_largest(rows: int, tokens: int) -> None:
    buckets = Buckets(rows, tokens)
    for step_rows in {1, 2, rows // 3 or 1, rows // 2 or 1, rows}:
        for step_tokens in {step_rows, step_rows + 1, step_rows + 37, tokens // 2, tokens}:
            if not (step_rows <= rows and step_rows <= step_tokens <= tokens):
                continue
            bucket = buckets.fit(step_tokens, step_rows)
            assert bucket.tokens >= step_tokens and bucket.rows >= step_rows
            assert bucket.decode == (step_tokens == step_rows)
            assert any(
                bucket.tokens <= most.tokens and bucket.rows <= most.rows
                for most in buckets.largest
                if most.decode == bucket.decode
            )
            assert bucket.tokens - step_tokens < max(16, step_tokens / 2, TILE)


@pytest.mark.parametrize(("rows", "tokens"), SERVERS)
def test_all_buckets_but_those_of_long_steps_get_graphs(rows: int, tokens: int) -> None:
    buckets = Buckets(rows, tokens)
    graphs = set(buckets.graphs())
    assert len(graphs) == len(buckets.graphs())
    for step_tokens in range(1, min(tokens, MAX_MIXED) + 1):
        for step_rows in {1, min(rows, step_tokens)}:
            assert buckets.fit(step_tokens, step_rows) in graphs
    assert set(buckets.startup_set()) <= graphs
    assert buckets.graphs()[0].tokens == max(bucket.tokens for bucket in graphs)


@pytest.mark.parametrize(("rows", "tokens"), SERVERS)
@pytest.mark.parametrize("launch_bound", [0, 2048, 2400, 3000, 4096, 20_000])
@pytest.mark.parametrize("images", [False, True])
def test_larger_steps_get_graphs_while_the_host_would_take_longer_to_launch_them(
    rows: int, tokens: int, launch_bound: int, images: bool
) -> None:
    plain, buckets = (Buckets(rows, tokens, images=images) for _ in range(2))
    new = buckets.extend(launch_bound)
    assert set(buckets.graphs()) == {*plain.graphs(), *new} and not buckets.extend(launch_bound)
    assert buckets.graphs()[0].tokens == max(bucket.tokens for bucket in buckets.graphs())
    assert all(MAX_MIXED < bucket.tokens <= launch_bound for bucket in new)
    most = max((bucket.tokens for bucket in new), default=0)
    assert most > 0.8 * min(launch_bound, tokens) or min(launch_bound, tokens) < 1.25 * MAX_MIXED
    captured = set(buckets.startup_set())
    for step_tokens in range(max(rows, MAX_MIXED) + 1, tokens + 1):
        bucket = buckets.fit(step_tokens, rows)
        assert step_tokens <= bucket.tokens <= min(1.25 * step_tokens, tokens)
        assert (bucket in captured) == (step_tokens <= most)
        if step_tokens > most:
            assert bucket == plain.fit(step_tokens, rows)
        if images:
            of_images = buckets.fit(step_tokens, 1, images=True)
            assert (of_images in new) == (step_tokens <= most)


@pytest.mark.parametrize(("rows", "tokens"), SERVERS)
def test_steps_with_images_have_one_graph_for_every_number_of_tokens(
    rows: int, tokens: int
) -> None:
    plain, seeing = Buckets(rows, tokens), Buckets(rows, tokens, images=True)
    assert not any(bucket.images for bucket in plain.graphs())
    of_images = [bucket for bucket in seeing.graphs() if bucket.images]
    assert [bucket for bucket in seeing.graphs() if not bucket.images] == plain.graphs()
    assert seeing.startup_set() == plain.startup_set()
    for step_tokens in range(1, min(tokens, MAX_MIXED) + 1):
        found = {
            seeing.fit(step_tokens, step_rows, images=True)
            for step_rows in {1, min(rows, step_tokens)}
        }
        [bucket] = found
        assert bucket in of_images and not bucket.decode
        assert bucket.tokens >= step_tokens and bucket.rows >= min(rows, step_tokens)
    largest = seeing.fit(tokens, 1, images=True)
    assert (largest in of_images) == (tokens <= MAX_MIXED) and largest.tokens == tokens
    assert len({bucket.tokens for bucket in of_images}) == len(of_images)


def test_small_steps_of_rows_that_decode_are_not_padded() -> None:
    buckets = Buckets(256, 8192)
    assert all(buckets.fit(rows, rows) == Bucket(rows, rows, True) for rows in range(1, 33))


@pytest.mark.parametrize("most", [300, 1024, 2500, 8192])
def test_steps_of_many_rows_are_not_padded_to_the_most_that_there_may_be(most: int) -> None:
    buckets = Buckets(most, 8192)
    for rows in range(257, most + 1):
        assert buckets.fit(rows, rows).rows < rows + 32 + rows / 16
        assert buckets.fit(8192, rows).rows < 2 * rows


@pytest.mark.parametrize("most", [256, 1024, 8192])
def test_a_server_begins_with_a_graph_of_at_most_twice_the_rows_for_any_that_decode(
    most: int,
) -> None:
    sizes = sorted(bucket.tokens for bucket in Buckets(most, 8192).startup_set() if bucket.decode)
    assert sizes[0] == 1 and sizes[-1] == most
    assert all(larger <= 2 * smaller for smaller, larger in pairwise(sizes))


def test_decode_rows_of_several_tokens_have_buckets_of_their_own() -> None:
    buckets = Buckets(64, 2048, row_tokens=4)
    assert buckets.fit(4 * 33, 33) == Bucket(4 * 40, 40, True)
    assert not buckets.fit(33, 33).decode, "rows of one token each are a mixed step there"
    for bucket in buckets.graphs():
        assert not bucket.decode or bucket.tokens == 4 * bucket.rows
    assert {bucket.rows for bucket in buckets.startup_set() if bucket.decode} == {
        1, 2, 4, 8, 16, 32, 64
    }  # fmt: skip


def test_a_prompt_does_not_pass_for_decode_rows_of_several_tokens() -> None:
    """With four tokens a decode row, one row of one token and one of seven have eight, too."""
    buckets = Buckets(64, 2048, row_tokens=4)
    assert buckets.fit(8, 2, longest=4) == Bucket(8, 2, True)
    assert buckets.fit(8, 2, longest=7) == Bucket(16, 16, False)
    assert Bucket(8, 2, True).row_tokens == 4 and Bucket(16, 16, False).row_tokens == 16
