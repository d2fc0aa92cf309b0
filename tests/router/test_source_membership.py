"""Which nodes of a source are in use: nothing but its end takes a healthy node out, and what has ended goes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_router.nodes.node import NodeSpec, Role
from pd_router.sources.base import NamedNode, Roster, is_logged
from pd_router.sources.membership import GONE_S, Membership, Sight

UP = Sight(serves=True, decodes=True, down_s=0.0, restarts=0)
DOWN = replace(UP, serves=False, down_s=1.0)
NEVER = replace(DOWN, down_s=inf)


def node(name: str, *, ready: bool = True, uid: str = "1", role: Role = Role.DECODE) -> NamedNode:
    return NamedNode(NodeSpec(f"http://{name}:1", role, name), uid, ready)


def told(*nodes: NamedNode, ended: tuple[NamedNode, ...] = ()) -> Roster:
    return Roster(nodes, frozenset(one.key for one in ended))


def sights(**by_name: Sight) -> dict[str, Sight]:
    return {f"http://{name}:1": sight for name, sight in by_name.items()}


def names(member: Membership) -> str:
    return "".join(sorted(one.spec.node_id for one in member.in_use))


def with_two() -> Membership:
    member = Membership()
    member.receive(told(node("a"), node("b")), {})
    return member


BOTH_UP = sights(a=UP, b=UP)


def test_readiness_admits() -> None:
    member = Membership()
    member.receive(told(node("a", ready=False), node("b")), {})
    assert names(member) == "b"
    member.receive(told(node("a"), node("b")), {})
    assert names(member) == "ab"


@pytest.mark.parametrize("sight", [UP, DOWN, NEVER])
def test_readiness_does_not_expel(sight: Sight) -> None:
    """A node that is down gets no requests, and is back after one good answer: that is the table's own look."""
    member = with_two()
    member.receive(told(node("a", ready=False), node("b", ready=False)), sights(a=sight, b=sight))
    assert names(member) == "ab"
    assert not member.is_doubted


def test_another_pod_at_the_same_url_is_admitted_anew() -> None:
    member = with_two()
    member.receive(told(node("a", uid="2", ready=False), node("b")), BOTH_UP)
    assert names(member) == "b"
    member.receive(told(node("a", uid="2"), node("b")), BOTH_UP)
    assert names(member) == "ab"


def test_a_known_end_is_believed_of_all_nodes_at_once() -> None:
    member = with_two()
    member.receive(told(ended=(node("a"), node("b"))), BOTH_UP)
    assert (names(member), member.is_doubted) == ("", False)


def test_an_absence_is_believed_while_another_node_serves() -> None:
    member = with_two()
    member.receive(told(node("b")), BOTH_UP)
    assert (names(member), member.is_doubted) == ("b", False)


def test_of_an_empty_source_the_living_nodes_stay() -> None:
    member = with_two()
    member.receive(told(), sights(a=UP, b=NEVER))
    assert (names(member), member.is_doubted, len(member.held)) == ("a", True, 1)
    member.look(sights(a=UP))
    member.receive(told(), sights(a=DOWN))  # one bad check
    assert names(member) == "a"
    member.look(sights(a=replace(DOWN, down_s=GONE_S)))
    assert (names(member), member.is_doubted) == ("", False)


def test_what_is_held_goes_when_another_process_is_there() -> None:
    member = with_two()
    member.receive(told(), BOTH_UP)
    member.look(sights(a=UP, b=replace(UP, restarts=1)))
    assert names(member) == "a"


def test_a_drained_node_is_held_with_the_others_and_goes_when_all_are_drained() -> None:
    """Without its place in the table it would come back without its order, when the source is right again."""
    member = with_two()
    drained = replace(UP, serves=False, is_drained=True)
    member.receive(told(), sights(a=UP, b=drained))
    assert (names(member), member.is_doubted) == ("ab", True)
    member.look(sights(a=drained, b=drained))
    assert (names(member), member.is_doubted) == ("", False)


@pytest.mark.parametrize("word", [told(), told(node("a", ready=False), node("b", ready=False))])
def test_what_another_router_had_in_use_is_held_until_its_first_check(word: Roster) -> None:
    """A worker or a successor that starts while the source is away, names none, or calls every node not ready."""
    member = Membership()
    member.receive(word, {})
    assert names(member) == ""
    member.restore([node("a"), node("b")], word, {})
    assert names(member) == "ab"
    member.receive(told(node("a", ready=False)), BOTH_UP)
    assert names(member) == "a"


def test_what_another_router_had_in_use_goes_with_its_end() -> None:
    member = Membership()
    member.restore([node("a"), node("b")], told(), {})
    member.look(sights(a=replace(DOWN, down_s=GONE_S), b=UP))
    assert names(member) == "b"
    member.receive(told(node("b", uid="2", ready=False)), sights(b=UP))
    assert names(member) == ""


def test_a_restart_before_the_doubt_does_not_count() -> None:
    member = with_two()
    member.receive(told(), sights(a=replace(UP, restarts=3), b=UP))
    member.look(sights(a=replace(UP, restarts=3), b=UP))
    assert names(member) == "ab"


def test_an_end_that_is_told_later_ends_the_doubt_of_that_node() -> None:
    member = with_two()
    member.receive(told(), BOTH_UP)
    member.receive(told(ended=(node("a"),)), BOTH_UP)
    assert names(member) == "b"
    member.receive(told(node("b", uid="2", ready=False)), BOTH_UP)
    assert (names(member), member.is_doubted) == ("", False)


def test_a_source_that_moves_to_other_nodes_is_followed_when_one_of_them_serves() -> None:
    member = with_two()
    member.receive(told(node("c"), node("d")), BOTH_UP)
    assert names(member) == "abcd"
    member.look(BOTH_UP | sights(c=NEVER, d=NEVER))
    assert (names(member), member.is_doubted) == ("abcd", True)
    member.look(BOTH_UP | sights(c=NEVER, d=UP))
    assert (names(member), member.is_doubted) == ("cd", False)


def test_a_node_that_is_named_again_is_no_longer_doubted() -> None:
    member = with_two()
    member.receive(told(), BOTH_UP)
    member.receive(told(node("a"), node("b", ready=False)), BOTH_UP)
    assert (names(member), member.is_doubted) == ("ab", False)


def test_a_change_after_an_empty_reading_says_nothing_of_the_others() -> None:
    """An empty list, then an event of one pod: only the next list tells that the other is gone."""
    member = with_two()
    member.receive(told(), BOTH_UP)
    member.receive(replace(told(node("a")), is_whole=False), BOTH_UP)
    member.look(BOTH_UP)
    assert (names(member), member.is_doubted) == ("ab", True)
    member.receive(told(node("a")), BOTH_UP)
    assert (names(member), member.is_doubted) == ("a", False)


def test_without_a_node_that_decodes_the_source_is_doubted() -> None:
    member, p_up = Membership(), replace(UP, decodes=False)
    both = node("p", role=Role.PREFILL), node("a")
    member.receive(told(*both), {})
    member.receive(told(both[0]), sights(p=p_up, a=UP))
    assert (names(member), member.is_doubted) == ("ap", True)
    member.look(sights(p=p_up, a=replace(DOWN, down_s=GONE_S)))
    assert (names(member), member.is_doubted) == ("p", False)
    member.receive(told(), sights(p=p_up))
    assert (names(member), member.is_doubted) == ("p", True)


def test_the_log_tells_ever_fewer_failures() -> None:
    assert [number for number in range(1, 43_201) if is_logged(number)] == [2**power for power in range(16)]


@dataclass
class World:
    """Pods a, b, c, of which a prefills; the source may tell the truth or err."""

    uids: dict[str, int] = field(default_factory=dict)  # pods that live
    ready: dict[str, bool] = field(default_factory=dict)  # as the source says
    up: dict[str, bool] = field(default_factory=dict)  # /health of what is at the address
    restarts: dict[str, int] = field(default_factory=dict)
    ever_ready: set[tuple[str, int]] = field(default_factory=set)

    def named(self, name: str) -> NamedNode:
        role = Role.PREFILL if name == "a" else Role.DECODE
        return node(name, ready=self.ready[name], uid=str(self.uids[name]), role=role)

    def tell(self, names: str, ended: tuple[NamedNode, ...] = ()) -> Roster:
        nodes = [self.named(name) for name in names if name in self.uids]
        self.ever_ready |= {(name, self.uids[name]) for name in names if self.ready.get(name) and name in self.uids}
        return told(*nodes, ended=ended)

    def sights(self, member: Membership, down_s: float) -> dict[str, Sight]:
        return {
            spec.url: Sight(self.up.get(spec.node_id, False), spec.role is Role.DECODE,
                            0.0 if self.up.get(spec.node_id) else down_s, self.restarts.get(spec.node_id, 0))
            for spec in (one.spec for one in member.in_use)
        }  # fmt: skip

    def healthy(self, member: Membership) -> set[str]:
        return {one.spec.node_id for one in member.in_use if self.up.get(one.spec.node_id)}


NAMES = st.sampled_from("abc")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["start", "delete", "replace", "crash", "ready", "unready", "blip"]), NAMES),
        st.tuples(st.sampled_from(["all unready", "list nothing", "list all", "look"]), st.just("")),
        st.tuples(st.just("list some"), st.text("abc", max_size=3)),
    ),
    max_size=30,
)


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_no_healthy_node_goes_without_cause_and_every_deleted_one_goes(steps: list[tuple[str, str]]) -> None:
    world, member = World(), Membership()
    for what, name in steps:
        before = world.healthy(member)
        decoded = before & {"b", "c"}
        may_go: set[str] = set()
        word = None
        match what:
            case "start" if name not in world.uids:
                world.uids[name] = world.uids.get(name, 0) + len(world.ever_ready) + 1
                world.ready[name], world.up[name] = False, True
                world.restarts[name] = world.restarts.get(name, 0) + 1
                may_go = {name}  # what was held at its address restarts, or is another pod
                word = world.tell("abc")
            case "delete" if name in world.uids:
                gone = world.named(name)
                del world.uids[name]
                world.up[name], may_go = False, {name}
                word = world.tell("abc", ended=(gone,))
            case "replace" if name in world.uids:
                world.uids[name] += 100
                world.ready[name], may_go = False, {name}
                world.restarts[name] += 1
                word = world.tell("abc")
            case "crash" if name in world.uids:
                world.restarts[name] += 1
                may_go = {name} if len(member.held) else set()
            case "ready" | "unready" if name in world.uids:
                world.ready[name] = what == "ready"
                word = world.tell("abc")
            case "blip":
                up, world.up[name] = world.up.get(name, False), False
                member.look(world.sights(member, 1.0))
                world.up[name] = up
            case "all unready":
                world.ready = dict.fromkeys(world.ready, False)
                word = world.tell("abc")
            case "list nothing":
                word = world.tell("")
            case "list all":
                word = world.tell("abc")
            case "list some":
                word = world.tell("".join(sorted(set(name))))
        if word is not None:
            member.receive(word, world.sights(member, 1.0))
        member.look(world.sights(member, 1.0))
        after = world.healthy(member)
        if what == "list some":  # an absence is believed only where another node takes the requests
            assert not before or after
            assert not decoded or after & {"b", "c"}
        else:
            assert before - after <= may_go, (what, name)
    member.receive(world.tell("abc"), world.sights(member, GONE_S))
    member.look(world.sights(member, GONE_S))
    in_use = {one.spec.node_id for one in member.in_use}
    assert in_use >= {name for name in world.uids if world.ready[name]}
    assert all((name, world.uids[name]) in world.ever_ready for name in in_use & world.uids.keys())
    assert not in_use - world.uids.keys(), "a pod that is gone is out"
