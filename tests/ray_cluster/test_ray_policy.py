"""What the controller decides: single cases, and a random history that must end in the goal."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pd_cluster.launch.on_ray import policy
from pd_cluster.launch.on_ray.policy import (
    Goal,
    Placement,
    RayNode,
    RoutedNode,
    UnitOrder,
    UnitView,
    choose,
    decide,
    unit_orders,
)
from pd_cluster.launch.on_ray.spec import ROLES
from pd_cluster.launch.on_ray.unit import UnitPhase

GOAL = Goal({"prefill": 1, "decode": 2, "mixed": 0, "router": 1}, grace_s=30.0)


def unit(name: str, phase: UnitPhase = UnitPhase.READY, **more: object) -> UnitView:
    role = name.partition("-")[0]
    return replace(UnitView(name, role, phase, url=f"http://{name}:80"), **more)  # type: ignore[arg-type]


def routed(name: str, state: str = "active", outstanding: int = 0, healthy: bool = True) -> RoutedNode:
    return RoutedNode(f"http://{name}:80", name.partition("-")[0], state, healthy, True, outstanding)


WHOLE = [unit("prefill-1"), unit("decode-2"), unit("decode-3"), unit("router-4")]
TABLE = [routed("prefill-1"), routed("decode-2"), routed("decode-3")]


def test_nothing_to_do_when_all_is_there() -> None:
    assert decide(GOAL, WHOLE, [TABLE]) == policy.Decision()
    assert unit_orders(WHOLE, TABLE) == []
    assert policy.is_whole(GOAL, WHOLE, [TABLE])


def test_what_ended_or_fell_silent_goes_and_is_made_up_for() -> None:
    units = [unit("prefill-1", UnitPhase.ENDED), unit("decode-2", silent_s=policy.LOST_S), WHOLE[2], WHOLE[3]]
    decision = decide(GOAL, units, [TABLE])
    assert decision.discard == ["prefill-1", "decode-2"]
    assert decision.create == ["prefill", "decode"]
    assert decide(GOAL, units, [TABLE], held_back={"decode"}).create == ["prefill"]


def test_a_silent_node_leaves_the_routers_long_before_it_is_replaced() -> None:
    units = [WHOLE[0], unit("decode-2", silent_s=policy.SILENT_S), WHOLE[2], WHOLE[3]]
    assert decide(GOAL, units, [TABLE]) == policy.Decision()
    assert unit_orders(units, TABLE) == [UnitOrder("remove", "decode-2:80")]
    assert not policy.is_whole(GOAL, units, [TABLE])
    assert unit_orders(WHOLE, TABLE[::2]) == [UnitOrder("add", "http://decode-2:80", "decode")]  # it was heard again


DOUBT_S = 150.0


def silent(*units: UnitView, silent_s: float = policy.LOST_S) -> list[UnitView]:
    return [replace(view, silent_s=silent_s) for view in units]


def weighed(units: list[UnitView], here: str = "head") -> list[UnitView]:
    return list(policy.weigh(units, here, DOUBT_S).units)


def test_when_most_are_silent_at_once_none_is_removed_and_none_is_killed() -> None:
    units = [*silent(*WHOLE[:3]), WHOLE[3]]
    weighed = policy.weigh(units, "head", DOUBT_S)
    assert (weighed.num_answering, weighed.num_known) == (1, 4)
    assert weighed.spared == ("decode-2", "decode-3", "prefill-1")
    assert decide(GOAL, list(weighed.units), [TABLE]) == policy.Decision()
    assert unit_orders(weighed.units, TABLE) == []
    assert not policy.is_whole(GOAL, units, [TABLE])  # what is told is what was heard
    assert decide(GOAL, units, [TABLE]).discard == ["prefill-1", "decode-2", "decode-3"]  # without the doubt


def test_silence_of_half_is_believed() -> None:
    units = [*silent(*WHOLE[:2]), *WHOLE[2:]]
    assert weighed(units) == units
    assert decide(GOAL, weighed(units), [TABLE]).discard == ["prefill-1", "decode-2"]
    pair = [unit("mixed-1"), *silent(unit("router-2"))]  # the smallest cluster: one of two
    assert weighed(pair) == pair
    assert weighed(silent(*pair)) == [unit("mixed-1"), unit("router-2")]
    assert weighed([]) == []


def test_a_silent_unit_with_a_healthy_node_is_spared() -> None:
    """Until it must have ended by itself, because it was not asked."""
    units = [*silent(*WHOLE[:2]), *WHOLE[2:]]
    weighed = policy.weigh(units, "head", DOUBT_S, {"http://decode-2:80", "http://elsewhere:80"})
    assert (weighed.is_doubted, weighed.spared) == (False, ("decode-2",))
    assert decide(GOAL, list(weighed.units), [TABLE]).discard == ["prefill-1"]
    assert unit_orders(weighed.units, TABLE) == [UnitOrder("remove", "prefill-1:80")]
    late = silent(*WHOLE[:2], silent_s=DOUBT_S)
    assert not policy.weigh([*late, *WHOLE[2:]], "head", DOUBT_S, {"http://decode-2:80"}).spared


def test_a_short_silence_is_none() -> None:
    units = silent(*WHOLE, silent_s=policy.SILENT_S - 0.1)
    assert policy.weigh(units, "head", DOUBT_S) == policy.WeighedUnits(tuple(units), 4, 4)
    units = silent(*WHOLE, silent_s=policy.SILENT_S)
    assert unit_orders(weighed(units), TABLE) == []


def test_units_beside_the_controller_prove_no_contact_with_others() -> None:
    there = silent(*[unit(f"decode-{number}", ray_node="b") for number in (1, 2)])
    here = [unit(f"router-{number}", ray_node="a") for number in (3, 4, 5)]
    assert policy.weigh([*there, *here], "a", DOUBT_S).spared == ("decode-1", "decode-2")
    assert not policy.weigh([*there, *here], "c", DOUBT_S).spared
    # nor do they need any: one that hangs beside it is silent by itself
    there = [replace(view, silent_s=0.0) for view in there]
    assert not policy.weigh([*there, *silent(*here)], "a", DOUBT_S).spared
    # on one machine there are no others
    assert not policy.weigh([*here[:2], *silent(here[2])], "a", DOUBT_S).spared
    assert policy.weigh([here[0], *silent(*here[1:])], "a", DOUBT_S).spared == ("router-4", "router-5")


def test_rays_word_is_believed_whatever_is_silent() -> None:
    units = [unit("prefill-1", UnitPhase.LOST, silent_s=20.0), *silent(*WHOLE[1:])]
    decision = decide(GOAL, weighed(units), [TABLE])
    assert (decision.discard, decision.create) == (["prefill-1"], ["prefill"])
    assert unit_orders(weighed(units)[1:], TABLE) == [UnitOrder("remove", "prefill-1:80")]


def test_units_that_run_nowhere_are_no_witnesses() -> None:
    idle = [
        unit("decode-5", UnitPhase.ENDED),
        unit("decode-6", UnitPhase.LOST),
        *silent(unit("decode-7", UnitPhase.WAITING)),
    ]
    units = [WHOLE[0], *silent(WHOLE[1]), *silent(*idle)]
    assert policy.weigh(units, "head", DOUBT_S) == policy.WeighedUnits(tuple(units), 1, 2)
    long = silent(unit("decode-8", UnitPhase.WAITING), silent_s=policy.REPLACE_WAITING_S)
    assert decide(GOAL, weighed([*silent(*WHOLE), *long]), []).discard == ["decode-8"]  # it waits for a place


def test_units_that_an_earlier_controller_made_may_run_though_this_one_hears_none() -> None:
    units = silent(*[unit(view.name, UnitPhase.WAITING, was_found=True) for view in WHOLE], silent_s=100.0)
    assert decide(GOAL, weighed(units), []) == policy.Decision()
    assert len(decide(GOAL, units, []).discard) == 4


def test_doubt_ends_when_units_that_were_not_asked_have_ended_by_themselves() -> None:
    units = silent(*WHOLE, silent_s=DOUBT_S - 1)
    assert decide(GOAL, weighed(units), []) == policy.Decision()
    units[1] = replace(units[1], silent_s=DOUBT_S)
    assert decide(GOAL, weighed(units), []).discard == ["decode-2"]


def test_one_too_many_is_drained_by_every_router_then_stopped() -> None:
    goal = replace(GOAL, counts={**GOAL.counts, "decode": 1, "router": 2})
    units = [*WHOLE, unit("router-5")]
    assert decide(goal, units, [TABLE, TABLE]).leave == ["decode-3"]
    units[2] = unit("decode-3", UnitPhase.LEAVING, phase_s=1)
    assert unit_orders(units, TABLE) == [UnitOrder("drain", "decode-3:80")]
    busy = [*TABLE[:2], routed("decode-3", "draining", outstanding=1)]
    idle = [*TABLE[:2], routed("decode-3", "draining")]
    for tables in ([TABLE, idle], [busy, idle], [idle]):  # one does not know yet, has work there, does not answer
        assert not decide(goal, units, tables).stop
    assert decide(goal, units, [idle, idle]).stop == {"decode-3": 29.0}
    units[2] = unit("decode-3", UnitPhase.LEAVING, phase_s=31)
    assert decide(goal, units, [busy, idle]).stop == {"decode-3": policy.MIN_STOP_S}
    units[2] = unit("decode-3", UnitPhase.STOPPING)
    assert unit_orders(units, idle) == []  # it stays known until it has ended, so that it is not added again
    assert decide(goal, units, [idle, idle]) == policy.Decision()


def test_the_first_to_go_is_the_one_that_serves_nothing_then_one_of_the_fullest_machine() -> None:
    units = [
        unit("decode-1", ray_node="a"), unit("decode-2", ray_node="b"), unit("decode-3", ray_node="b"),
        unit("decode-4", ray_node="c"), unit("decode-5", UnitPhase.STARTING), unit("decode-6", UnitPhase.WAITING),
    ]  # fmt: skip
    names = [victim.name for victim in policy.victims(units, 5)]
    assert names == ["decode-6", "decode-5", "decode-3", "decode-4", "decode-2"]


def test_a_silent_node_goes_before_one_that_serves() -> None:
    goal = replace(GOAL, counts={**GOAL.counts, "decode": 1})
    units = [WHOLE[0], unit("decode-2", silent_s=policy.SILENT_S), WHOLE[2], WHOLE[3]]
    assert decide(goal, units, [TABLE]).leave == ["decode-2"]  # perhaps its machine has just died
    units[1] = replace(units[1], silent_s=policy.LOST_S)
    assert decide(goal, units, [TABLE]) == policy.Decision(discard=["decode-2"])


def test_at_the_end_the_routers_go_before_the_nodes() -> None:
    goal = replace(GOAL, closing=True)
    first = decide(goal, WHOLE, [TABLE])
    assert (first.stop, first.leave) == ({"router-4": 30.0}, [])
    stopping = [*WHOLE[:3], unit("router-4", UnitPhase.STOPPING)]
    assert decide(goal, stopping, []) == policy.Decision()
    assert decide(goal, WHOLE[:3], []).leave == ["prefill-1", "decode-3", "decode-2"]
    leaving = [replace(view, phase=UnitPhase.LEAVING) for view in WHOLE[:3]]
    assert set(decide(goal, leaving, []).stop) == {"prefill-1", "decode-2", "decode-3"}


def test_a_unit_that_hangs_while_it_stops_is_taken_away() -> None:
    hung = unit("decode-3", UnitPhase.STOPPING, phase_s=100)
    assert decide(GOAL, [*WHOLE[:2], hung, WHOLE[3]], [TABLE]).discard == ["decode-3"]


def test_a_url_that_comes_back_is_removed_before_it_is_added() -> None:
    table = [routed("decode-2"), replace(routed("decode-3"), role="prefill")]
    units = [replace(unit("decode-9"), url="http://decode-3:80"), unit("prefill-8")]
    told = unit_orders(units, table)
    assert told == [
        UnitOrder("remove", "decode-2:80"), UnitOrder("add", "http://decode-3:80", "decode"),
        UnitOrder("add", "http://prefill-8:80", "prefill"),
    ]  # fmt: skip


def test_a_node_with_a_role_that_an_order_has_changed_is_not_posted_again() -> None:
    """Of `balance: true`: else the controller would post it in each round for as long as it runs."""
    moved = replace(routed("decode-2"), role="prefill", has_moved=True)
    assert unit_orders([unit("decode-2")], [moved]) == []
    assert unit_orders([unit("decode-2")], [replace(moved, has_moved=False)]) != []


def test_nodes_of_others_are_left_alone() -> None:
    assert unit_orders([], [replace(routed("decode-2"), posted=False), routed("decode-3", "leaving")]) == []
    assert policy.is_whole(GOAL, WHOLE, [[*TABLE, replace(routed("decode-9"), posted=False)]])


A, B = RayNode("a", "10.0.0.1", {"CPU": 4.0}), RayNode("b", "10.0.0.2", {"CPU": 4.0})
BUNDLES = {role: {"CPU": 1.0} for role in ROLES}


def test_spread_goes_where_the_fewest_of_the_role_are_and_pack_where_most_is() -> None:
    units = [unit("decode-1", ray_node="a"), unit("prefill-2", ray_node="b"), unit("prefill-3", ray_node="b")]
    assert choose("spread", "decode", {"CPU": 1}, units, BUNDLES, [A, B]).target == "b"
    assert choose("spread", "prefill", {"CPU": 1}, units, BUNDLES, [A, B]).target == "a"
    assert choose("pack", "decode", {"CPU": 1}, units, BUNDLES, [A, B]).target == "b"
    assert choose("pack", "decode", {"CPU": 3}, units, BUNDLES, [A, B]).target == "a"  # b has no room


def test_no_room_is_left_to_ray_and_a_suspect_is_avoided() -> None:
    assert choose("spread", "decode", {"CPU": 5}, [], BUNDLES, [A, B]) == Placement(None)
    assert choose("spread", "decode", {"GPU": 1}, [], BUNDLES, [A, B]) == Placement(None)
    assert choose("spread", "decode", {"CPU": 1}, [], BUNDLES, [A, B], {"a"}) == Placement("b", ("a",))


def test_a_suspect_is_better_than_no_place() -> None:
    edge = RayNode("a", A.address, {"edge": 1.0})
    assert choose("spread", "router", {"edge": 1}, [], BUNDLES, [edge, B], {"a"}) == Placement(None)
    twin = [unit("router-1", ray_node="a")]  # but where another listens on its port, it never goes
    assert choose("spread", "router", {}, twin, BUNDLES, [A], {"a"}, one_per_address=True) == Placement(None, ("a",))


def test_routers_of_one_port_never_share_an_address() -> None:
    twin = RayNode("c", A.address, A.total)  # another Ray node of the same machine
    units = [unit("router-1", ray_node="a")]
    chosen = choose("pack", "router", {"CPU": 1}, units, BUNDLES, [A, twin, B], one_per_address=True)
    assert chosen == Placement("b", ("a", "c"))
    assert choose("pack", "router", {"CPU": 1}, units, BUNDLES, [A, twin, B]).target == "a"


def test_backoff_grows_to_a_bound() -> None:
    assert [policy.backoff_s(number) for number in (0, 1, 2, 3, 10)] == [0, 2, 4, 8, 30]


@dataclass
class World:
    """Units and one router's table, which obey; `hit` makes one fail."""

    units: dict[str, UnitView] = field(default_factory=dict)
    table: dict[str, RoutedNode] = field(default_factory=dict)
    serial: int = 0
    cut: list[str] = field(default_factory=list)  # nodes stopped while a router would still send to them

    def round(self, goal: Goal) -> policy.Decision:
        views = list(self.units.values())
        ready = [view for view in views if view.role == "router" and view.phase is UnitPhase.READY]
        tables = [list(self.table.values())] if ready else []
        decision = decide(goal, views, tables)
        for table in tables:
            left = [view for view in views if view.name not in decision.discard]
            for order in unit_orders(left, table):
                self.obey(order)
        for name in decision.discard:
            del self.units[name]
        for name in decision.leave:
            self.units[name] = replace(self.units[name], phase=UnitPhase.LEAVING)
        for name in decision.stop:
            entry = self.table.get(self.units[name].url)
            if tables and entry is not None and entry.state == "active":
                self.cut.append(name)
            self.units[name] = replace(self.units[name], phase=UnitPhase.STOPPING)
        for role in decision.create:
            self.serial += 1
            name = f"{role}-{self.serial}"
            self.units[name] = unit(name, UnitPhase.WAITING)
        return decision

    def obey(self, order: UnitOrder) -> None:
        if order.action == "add":
            self.table[order.node] = RoutedNode(order.node, order.role, "active", True, True, 0)
        elif order.action == "remove":
            del self.table[f"http://{order.node}"]
        else:
            url = f"http://{order.node}"
            self.table[url] = replace(self.table[url], state="draining")

    def pass_time(self) -> None:
        """What starts comes up, what stops ends; a router that is new knows nothing."""
        after = {
            UnitPhase.WAITING: UnitPhase.STARTING,
            UnitPhase.STARTING: UnitPhase.READY,
            UnitPhase.STOPPING: UnitPhase.ENDED,
        }
        for name, view in self.units.items():
            phase = after.get(view.phase, view.phase)
            if view.role == "router" and phase is UnitPhase.READY and view.phase is not UnitPhase.READY:
                self.table.clear()
            silent_s = view.silent_s + policy.LOST_S if view.silent_s else 0.0
            self.units[name] = replace(view, phase=phase, silent_s=silent_s)

    def hit(self, choice: int, how: UnitPhase | None) -> None:
        """One unit ends, or (None) falls silent."""
        if self.units:
            name = sorted(self.units)[choice % len(self.units)]
            view = self.units[name]
            self.units[name] = replace(view, silent_s=policy.SILENT_S) if how is None else replace(view, phase=how)


COUNTS = st.fixed_dictionaries({
    "prefill": st.integers(0, 3), "decode": st.integers(1, 3), "mixed": st.integers(0, 1), "router": st.just(1),
})  # fmt: skip
EVENTS = st.one_of(
    COUNTS,
    st.tuples(st.integers(0, 9), st.sampled_from([UnitPhase.ENDED, UnitPhase.LOST, None])),
    st.none(),  # a round
)


@settings(max_examples=150, deadline=None)
@given(st.lists(EVENTS, max_size=25), COUNTS, st.booleans())
def test_any_history_ends_in_the_goal_and_no_node_is_stopped_that_would_get_requests(
    history: list[dict[str, int] | tuple[int, UnitPhase | None] | None], last: dict[str, int], closing: bool
) -> None:
    world, goal = World(), Goal(GOAL.counts, 30.0)
    for event in history:
        if isinstance(event, dict):
            goal = Goal(event, 30.0)
        elif event is not None:
            world.hit(*event)
        else:
            world.round(goal)
            world.pass_time()
    goal = Goal(last, 30.0, closing)
    for _ in range(15):
        world.round(goal)
        world.pass_time()
    units = list(world.units.values())
    assert not world.cut
    if closing:
        assert not units
    else:
        assert policy.is_whole(goal, units, [list(world.table.values())])
        assert world.round(goal) == policy.Decision()
