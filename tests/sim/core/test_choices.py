from __future__ import annotations

from trinamo.sim import Choice, Choices, ReplayChoices, SeedChoices


def test_every_answer_is_recorded_with_its_label() -> None:
    choices = ReplayChoices([2, 1])
    answers = [choices.below(5, "a"), choices.below(2, "b")]
    assert answers == [2, 1]
    assert choices.record == [Choice("a", 5, 2), Choice("b", 2, 1)]


def test_a_question_with_one_answer_is_no_decision() -> None:
    choices = SeedChoices(1)
    assert choices.below(1, "forced") == 0
    assert choices.record == []


def test_a_replay_list_wraps_values_and_is_dull_past_its_end() -> None:
    choices = ReplayChoices([7])
    answers = [choices.below(5, "a"), choices.below(5, "b")]
    assert answers == [2, 0]


def test_seeded_answers_are_within_range_and_repeat() -> None:
    def draw() -> list[int]:
        choices = SeedChoices(3)
        return [choices.below(n, "x") for n in range(2, 50)]

    first, again = draw(), draw()
    assert first == again
    assert all(0 <= value < n for n, value in enumerate(first, start=2))


def test_the_base_source_always_answers_dully() -> None:
    choices = Choices()
    assert [choices.chance(4, "x"), choices.below(9, "y")] == [False, 0]


def test_streams_depend_on_seed_and_name_and_are_not_recorded() -> None:
    choices = SeedChoices(1)
    drawn = {choices.stream("a").random(), choices.stream("b").random()}
    drawn.add(SeedChoices(2).stream("a").random())
    assert len(drawn) == 3
    assert choices.stream("a").random() in drawn
    assert choices.record == []


def test_a_seed_gives_every_answer_about_equally_often() -> None:
    choices = SeedChoices(3)
    counts = [0] * 7
    for _ in range(7000):
        counts[choices.below(7, "x")] += 1
    assert min(counts) > 800
    assert max(counts) < 1200
