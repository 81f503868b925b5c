"""The page pool and its chain of hashes."""

from __future__ import annotations

import pytest

from runtime.messages import PromptImage
from runtime.scheduler.kv_cache.page_pool import PagePool, chain_root, extend_chain, images_between


def hashes_of(tokens: list[int], *, salt: bytes = b"", page_size: int = 4) -> list[bytes]:
    hashes: list[bytes] = []
    extend_chain(hashes, chain_root(salt), tokens, page_size)
    return hashes


def pool_with(tokens: list[int], *, num_pages: int = 8) -> tuple[PagePool, list[int]]:
    """A pool in which one user holds the remembered pages of `tokens`."""
    pool = PagePool(num_pages)
    pages = pool.allocate(len(tokens) // 4)
    for page, page_hash in zip(pages, hashes_of(tokens), strict=True):
        pool.cache_page(page, page_hash)
    return pool, pages


def test_only_full_pages_have_a_hash() -> None:
    assert [len(hashes_of(list(range(count)))) for count in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_hashes_are_the_same_token_by_token_and_all_at_once() -> None:
    tokens = list(range(30))
    grown: list[bytes] = []
    for end in range(len(tokens) + 1):
        extend_chain(grown, chain_root(b""), tokens[:end], 4)
    assert grown == hashes_of(tokens)


def test_a_page_hash_depends_on_all_that_comes_before() -> None:
    assert hashes_of([1, 2, 3, 4, 5, 6, 7, 8])[1] != hashes_of([9, 2, 3, 4, 5, 6, 7, 8])[1]
    assert hashes_of([1, 2, 3, 4] * 2)[0] != hashes_of([1, 2, 3, 4] * 2)[1]


def test_salts_have_no_hash_in_common() -> None:
    tokens = list(range(16))
    assert not set(hashes_of(tokens)) & set(hashes_of(tokens, salt=b"x"))


def test_a_salt_cannot_imitate_a_chain_of_tokens() -> None:
    first, second = hashes_of([1, 2, 3, 4, 5, 6, 7, 8])
    page = b"".join(token.to_bytes(4, "little") for token in (1, 2, 3, 4))
    assert first not in (chain_root(first), chain_root(chain_root(b"") + page))
    assert hashes_of([5, 6, 7, 8], salt=chain_root(b"") + page) != [second]


def test_lookup_ends_at_the_first_page_that_is_not_remembered() -> None:
    pool, pages = pool_with(list(range(12)))
    assert pool.lookup(hashes_of([*range(8), 99, 99, 99, 99])) == pages[:2]
    assert pool.lookup(hashes_of([99, *range(1, 12)])) == []


def test_a_released_page_is_found_until_it_is_taken_again() -> None:
    pool, pages = pool_with(list(range(8)), num_pages=3)
    pool.release(pages)
    assert pool.num_free == 3
    assert pool.lookup(hashes_of(list(range(8)))) == pages
    pool.allocate(3)
    assert pool.lookup(hashes_of(list(range(8)))) == []
    pool.check_integrity([[0, 1, 2]])


def test_empty_pages_are_taken_before_remembered_ones() -> None:
    pool, pages = pool_with(list(range(8)), num_pages=6)
    scratch = pool.allocate(2)
    pool.release(pages)
    pool.release(scratch)
    assert not set(pool.allocate(4)) & set(pages)


def test_the_longest_released_prefix_is_forgotten_first_and_from_its_end() -> None:
    pool = PagePool(4)
    old, new = list(range(8)), list(range(50, 58))
    for tokens in (old, new):
        pages = pool.allocate(2)
        for page, page_hash in zip(pages, hashes_of(tokens), strict=True):
            pool.cache_page(page, page_hash)
        pool.release(pages)
    pool.allocate(1)
    assert len(pool.lookup(hashes_of(old))) == 1
    assert len(pool.lookup(hashes_of(new))) == 2


def test_a_shared_page_is_free_when_its_last_user_releases_it() -> None:
    pool, pages = pool_with(list(range(8)))
    pool.share(pages)
    pool.check_integrity([pages, pages])
    pool.release(pages)
    assert pool.num_used == 2
    pool.release(pages)
    assert pool.num_used == 0
    pool.check_integrity()


def test_a_free_page_can_be_shared_and_is_no_longer_free() -> None:
    pool, pages = pool_with(list(range(8)), num_pages=2)
    pool.release(pages)
    assert pool.count_free(pages) == 2
    pool.share(pages)
    assert (pool.num_free, pool.count_free(pages)) == (0, 0)


def test_of_two_pages_with_the_same_content_the_first_is_remembered() -> None:
    pool, pages = pool_with(list(range(4)))
    (twin,) = pool.allocate(1)
    pool.cache_page(twin, hashes_of(list(range(4)))[0])
    assert pool.lookup(hashes_of(list(range(4)))) == pages
    pool.release([twin])
    pool.check_integrity([pages])


def test_a_forgotten_page_is_not_found() -> None:
    pool, pages = pool_with(list(range(8)))
    pool.evict(pages[1:])
    assert pool.lookup(hashes_of(list(range(8)))) == pages[:1]
    pool.check_integrity([pages])


def test_a_page_released_twice_is_an_error() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(pages)


def test_a_page_that_no_request_uses_cannot_be_cached() -> None:
    with pytest.raises(AssertionError, match="not in use"):
        PagePool(2).cache_page(0, b"x")


def test_integrity_sees_a_leak() -> None:
    pool = PagePool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="recorded"):
        pool.check_integrity()


def test_a_page_is_named_by_the_images_that_have_tokens_in_it_and_no_others() -> None:
    images: list[PromptImage] = []
    end = 3
    for number, size in enumerate((5, 1, 30, 16, 2)):
        images.append(PromptImage(end, size, 0, 0, b"", bytes([number]) * 32))
        end += size + number % 2  # some follow each other at once
    for first in range(end + 2):
        for last in range(first + 1, end + 3):
            inside = [
                one
                for one in images
                if set(range(one.start, one.start + one.num_tokens)) & set(range(first, last))
            ]
            named = b"".join(one.start.to_bytes(8, "little") + one.digest for one in inside)
            assert images_between(images, first, last) == named
