"""Swaps on the echo engine: there and back, beside requests, and beside one another."""

import asyncio

from serving.engine import Generation
from serving.swap_schemas import SwapResult
from serving.weights import release_store
from tests.swap_fixtures import IN_PLACE, House, holds_two, house, until

__all__ = ["holds_two", "house"]


@IN_PLACE
async def test_new_requests_wait_for_an_engine_that_must_drain(house: House) -> None:
    running = await house.admission.enter()
    swapping = asyncio.create_task(house.swapper.swap(house.new.id))
    await until(lambda: not house.admission.open.is_set())
    waiting = asyncio.create_task(house.admission.enter())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    house.admission.leave(running)
    assert (await swapping).result == "live"
    late = await waiting
    assert (running.id, late.id) == (house.old.id, house.new.id)
    house.admission.leave(late)


@IN_PLACE
async def test_a_drain_that_takes_too_long_is_deferred(house: House) -> None:
    release_store.set_pending(house.pipeline_dir, house.new.id)
    running = await house.admission.enter()
    result = await house.swapper.swap(house.new.id)
    assert (result.result, result.phase) == ("deferred", "barrier")
    assert house.old.id in result.reasons[0]
    assert release_store.pending_release(house.pipeline_dir) == house.new.id
    house.admission.leave(running)
    await house.check_old_goes_on()


async def test_requests_never_wait_for_an_engine_that_holds_two(house: House) -> None:
    running = await house.admission.enter()
    assert (await house.swapper.swap(house.new.id)).result == "live"
    assert await house.answers() == house.new.id
    assert house.engine.resident == {house.old.id, house.new.id}
    generation = Generation(prompt=(1,), max_tokens=1)
    assert [step async for step in house.engine.generate(running.id, generation)]
    house.admission.leave(running)
    await until(lambda: house.engine.resident == {house.new.id})


async def test_the_way_back_waits_for_the_requests_that_the_release_still_answers(
    house: House,
) -> None:
    running = await house.admission.enter()
    assert (await house.swapper.swap(house.new.id)).result == "live"
    result = await house.swapper.swap(house.old.id)
    assert (result.result, result.phase) == ("deferred", "stage")
    assert f"{house.old.id} must leave the engine first" in result.reasons[0]
    generation = Generation(prompt=(1,), max_tokens=1)
    assert [step async for step in house.engine.generate(running.id, generation)]
    house.admission.leave(running)
    assert (await house.swapper.swap(house.old.id)).result == "live"
    await until(lambda: house.engine.resident == {house.old.id})


async def test_a_newer_request_overtakes_what_has_not_begun_to_commit(house: House) -> None:
    first, second, third = house.new, house.release(3), house.release(4)
    gate = house.engine.hang["stage"] = asyncio.Event()
    asked: list[asyncio.Task[SwapResult]] = []
    for release in (first, second, third):
        asked.append(asyncio.create_task(house.swapper.swap(release.id)))
        await until(lambda: ("stage", first.id) in house.engine.log)
    twice = asyncio.create_task(house.swapper.swap(third.id))
    await asyncio.sleep(0)
    gate.set()
    results = await asyncio.gather(*asked, twice)
    assert [result.result for result in results] == ["superseded", "superseded", "live", "live"]
    assert [result.superseded_by for result in results[:2]] == [third.id, third.id]
    assert ("stage", second.id) not in house.engine.log
    assert house.engine.log.count(("stage", third.id)) == 1
    assert await house.answers() == third.id
    await until(lambda: house.engine.resident == {third.id})


async def test_a_release_is_swapped_in_only_in_place_of_the_one_that_it_follows(
    house: House,
) -> None:
    third = house.release(3)
    assert (await house.swapper.swap(house.new.id, (house.old.id,))).result == "live"
    late = await house.swapper.swap(third.id, (house.old.id, third.id))
    assert (late.result, late.superseded_by) == ("superseded", house.new.id)
    assert late.reasons == (f"{house.new.id} was chosen meanwhile, so {third.id} is not",)
    assert await house.answers() == house.new.id
    # A rollback that has only been chosen so far counts too.
    release_store.set_pending(house.pipeline_dir, house.old.id)
    late = await house.swapper.swap(third.id, (house.new.id, third.id))
    assert (late.result, late.superseded_by) == ("superseded", house.old.id)
    assert release_store.pending_release(house.pipeline_dir) == house.old.id
    again = await house.swapper.swap(third.id, (house.old.id, None))
    assert again.result == "live"
    assert release_store.pending_release(house.pipeline_dir) is None


async def test_the_newest_request_wins_although_its_release_was_superseded(house: House) -> None:
    other = house.release(3)
    first, gate = await house.swap_held_at("stage", house.new.id)
    waiting = asyncio.create_task(house.swapper.swap(other.id))
    await asyncio.sleep(0)
    release_store.set_pending(house.pipeline_dir, house.new.id)
    again = asyncio.create_task(house.swapper.swap(house.new.id))
    await asyncio.sleep(0)
    commit = house.engine.hang["commit"] = asyncio.Event()
    gate.set()
    results = [(await each).result for each in (first, waiting)]
    assert results == ["superseded", "superseded"]
    # The mark is that of the swap that goes on.
    assert release_store.pending_release(house.pipeline_dir) == house.new.id
    commit.set()
    assert (await again).result == "live"
    assert await house.answers() == house.new.id
    assert release_store.pending_release(house.pipeline_dir) is None


async def test_one_may_wait_while_one_commits(house: House) -> None:
    third, fourth = house.release(3), house.release(4)
    first, gate = await house.swap_held_at("commit", house.new.id)
    waiting = asyncio.create_task(house.swapper.swap(third.id))
    await asyncio.sleep(0)
    newer = asyncio.create_task(house.swapper.swap(fourth.id))
    await asyncio.sleep(0)
    gate.set()
    assert (await waiting).superseded_by == fourth.id
    assert (await first).result == "live"
    assert (await newer).result == "live"
    assert await house.answers() == fourth.id


async def test_a_swap_goes_on_when_who_asked_hangs_up(house: House) -> None:
    asked, gate = await house.swap_held_at("stage", house.new.id)
    asked.cancel()
    gate.set()
    await until(lambda: house.admission.live.id == house.new.id)  # type: ignore[union-attr]
    assert await house.answers() == house.new.id
