"""Each way in which a leg fails: what the client gets, which nodes are asked and blamed, and that nothing is left."""

from __future__ import annotations

import pytest

from tests.router.leg_case import SOON_S
from tests.router.leg_case import LegCase as Case

ALONE = "direct no-prefill-node"
# Only the node that shall fail waits for so little: a busy machine would have others fail too
TICKET, FIRST_BYTE, IDLE = ({f"{wait}_timeout_s": SOON_S} for wait in ("ticket", "first_byte", "idle"))
NO_P, NO_D = "no prefill node left", "no decode node left"
DEATHS = "decode d0 died, decode left d0, decode d1 died, decode left d1, nodes died"

P_FAILS = [
    # p0 p1 > d0, the client gets, asked, counted, ill, closed
    Case("400 > ok", "400 p-first default: no (p0)", "p0", outcome="refused"),
    Case("503 ticket > ok", "200 p-first default p1 d0: all", "p0 p1 d0<p1", "prefill p0 refused"),
    Case("500 ticket > ok", "200 p-first default p1 d0: all", "p0 p1 d0<p1", "prefill p0 refused"),
    Case("error ticket > ok", "200 p-first default p1 d0: all", "p0 p1 d0<p1", "prefill p0 refused"),
    Case("no-ticket ticket > ok", "200 p-first default p1 d0: all", "p0 p1 d0<p1", "prefill p0 bad_answer", "p0"),
    Case("hangs-up ticket > ok", "200 p-first default p1 d0: all", "p0 p0 p1 d0<p1", "prefill p0 broken", "p0"),
    Case("gone ticket > ok", "200 p-first default p1 d0: all", "p1 d0<p1", "prefill p0 connect", "p0"),
    Case("503 > ok", "200 direct prefill-failed d0 d0: all", "p0 d0", f"prefill p0 refused, {NO_P}"),
    Case("gone > ok", "200 direct prefill-failed d0 d0: all", "d0", f"prefill p0 connect, {NO_P}", "p0"),
    Case("silent > ok", "200 direct prefill-failed d0 d0: all", "p0 d0", f"prefill p0 timeout, {NO_P}", closed="p0",
         settings=TICKET),
    Case("503 > ok", "502 p-first default: node_failed", "p0", f"prefill p0 refused, {NO_P}", outcome="failed",
         settings={"on_prefill_failure": "fail"}),
    Case("ticket-error > ok", "200 p-first default p0 d0: all", "p0 d0<p0", "prefill_after_ticket p0 refused"),
]  # fmt: skip

D_FAILS = [
    # p0 > d0 d1, the client gets, asked, counted, ill, closed
    Case("ticket > 503 ok", "200 p-first default p0 d1: all", "p0 d0<p0 d1<p0", "decode d0 refused"),
    Case("ticket > 500 ok", "200 p-first default p0 d1: all", "p0 d0<p0 d1<p0", "decode d0 refused"),
    Case("ticket > hangs-up ok", "200 p-first default p0 d1: all", "p0 d0<p0 d0<p0 d1<p0", "decode d0 broken", "d0"),
    *(
        Case(f"ticket-stands > {given}", f"{status} p-first default: no (d0)", "p0 d0<p0",
             f"decode d0 refused, {NO_D}, release ok", closed="p0", outcome="failed", stream=False)
        for given, status in ((503, 503), (500, 502), (429, 429))
    ),
    Case("ticket-stands > 504", "504 p-first default: no (d0)", "p0 d0<p0", "decode d0 refused, release ok",
         closed="p0", outcome="failed"),  # its time is up
    Case("ticket-stands > 404", "404 p-first default: no (d0)", "p0 d0<p0", "release ok", closed="p0",
         outcome="refused"),
    Case("ticket-stands > 503-and-p0", "503 p-first default: no (d0)", "p0 d0<p0",
         f"decode d0 refused, {NO_D}, prefill_after_ticket p0 broken, release failed", "p0", "p0", "failed",
         stream=False),
    Case("ticket > gone", "502 p-first default: node_failed", "p0", f"decode d0 connect, {NO_D}, release ok", "d0",
         outcome="failed"),
    Case("ticket > silent", "502 p-first default: node_failed", "p0 d0<p0", "decode d0 timeout, release ok",
         closed="d0", outcome="failed", stream=True, settings=FIRST_BYTE),
    Case("ticket > breaks", "502 p-first default: node_failed", "p0 d0<p0", f"decode d0 broken, {NO_D}, release ok",
         "d0", outcome="failed", stream=False),
    Case("ticket > breaks ok", "200 p-first default p0 d1: all", "p0 d0<p0 d1<p0", "decode d0 broken", "d0",
         stream=False),
    # it breaks a stream that has begun
    Case("ticket-stands > breaks", "200 p-first header p0 d0: a ? stream_interrupted CUT", "p0 d0<p0",
         "stream d0 broken", "d0", "p0", outcome="broken", stream=True, order="p-first"),
    Case("ticket > breaks", "200 d-first header d0 d0: a ? stream_interrupted CUT", "d0?",
         "stream d0 broken", "d0", outcome="broken", stream=True, order="d-first"),
    Case("ticket > no-end", "200 p-first default p0 d0: [DONE] stream_interrupted CUT", "p0 d0<p0",
         "stream d0 broken", "d0", outcome="broken", stream=True),
    Case("ticket > tells-error", "200 p-first default p0 d0: a engine died", "p0 d0<p0", stream=True),
    Case("ticket > stands", "200 p-first default p0 d0: a stream_interrupted CUT", "p0 d0<p0",
         "stream d0 timeout", closed="d0", outcome="broken", stream=True, settings=IDLE),
]  # fmt: skip

NOT_ILL = [  # a node that answers, and one that is slow
    *(
        Case(f"{given} > {given}", f"{status} direct prefill-failed: no (d0)", "p0 d0",
             f"prefill p0 refused, {NO_P}, decode d0 refused, {NO_D}", outcome="failed", order="p-first", stream=False)
        for given, status in ((429, 429), (500, 502), (502, 502), (503, 503))
    ),
    Case("504 > 504", "504 direct prefill-failed: no (d0)", "p0 d0", f"prefill p0 refused, {NO_P}, decode d0 refused",
         outcome="failed", order="p-first"),
    *(
        Case(f"{given} > {given}", f"{status} d-first header: no (d0)", "d0?",
             f"decode d0 refused, {NO_D}", outcome="failed", order="d-first", stream=False)
        for given, status in ((429, 429), (500, 502), (502, 502), (503, 503))
    ),
    Case("504 > 504", "504 d-first header: no (d0)", "d0?", "decode d0 refused", outcome="failed", order="d-first"),
    Case("silent > silent", "502 direct prefill-failed: node_failed", "p0 d0",
         f"prefill p0 timeout, {NO_P}, decode d0 timeout", closed="p0 d0", outcome="failed", stream=True,
         settings=TICKET | FIRST_BYTE),
]  # fmt: skip

DOWN = [  # judged by /health or by their death
    Case("> silent ok", f"200 {ALONE} d1 d1: all", "d0 d1", "decode d0 frozen, decode left d0", "d0", "d0",
         falls="d0 silent"),
    Case("> silent ok", f"200 {ALONE} d1 d1: all", "d0 d1", "decode d0 frozen, decode left d0", "d0", "d0",
         falls="d0 frozen"),
    Case("silent ticket > ok", "200 p-first default p1 d0: all", "p0 p1 d0<p1", "prefill p0 frozen, prefill left p0",
         "p0", "p0", falls="p0 silent"),
    # a request that kills nodes stops at the second
    Case("> dies dies dies dies", f"500 {ALONE}: nodes_died", "d0 d1", DEATHS, outcome="failed"),
    Case("> restarts restarts restarts restarts", f"500 {ALONE}: nodes_died", "d0 d1", DEATHS, outcome="failed"),
    Case("ticket-stands > dies-and-p0 ok", "500 p-first default: nodes_died", "p0 d0<p0",
         "prefill_after_ticket p0 broken, decode d0 died, decode left d0, nodes died, release failed", "p0", "p0",
         "failed", stream=False),
    Case("> blames-request blames-request", f"500 {ALONE}: nodes_died", "d0", "decode d0 refused, nodes died",
         outcome="failed"),
    # nodes that were gone before, and those that refuse, are no deaths
    Case("> gone lost-engine ok", f"200 {ALONE} d2 d2: all", "d1 d2",
         "decode d0 connect, decode d1 died, decode left d1", "d0"),
    Case("> gone gone gone ok", f"200 {ALONE} d3 d3: all", "d3",
         "decode d0 connect, decode d1 connect, decode d2 connect", "d0 d1 d2"),
    Case("> 503 lost-engine 503 hangs-up ok", f"200 {ALONE} d4 d4: all", "d0 d1 d2 d3 d3 d4",
         "decode d0 refused, decode d1 died, decode left d1, decode d2 refused, decode d3 broken", "d3"),
    # as many nodes are tried as live, or as are allowed
    *(
        Case("> 503 503 503 503", f"503 {ALONE}: no (d{tries - 1})", " ".join(f"d{at}" for at in range(tries)),
             ", ".join([f"decode d{at} refused" for at in range(tries)] + [NO_D]), outcome="failed", stream=False,
             settings={"max_decode_tries": limit})
        for limit, tries in ((0, 4), (1, 1), (3, 3))
    ),
]  # fmt: skip

READ_BY_D = [  # the prefill node is busy
    *(
        Case(f"ticket > {status}-alone", "200 p-first default p0 d0: all", "d0 p0 d0<p0",
             "decode d0 refused" + (status != 504) * f", {NO_D}", busy="p0")
        for status in (429, 500, 503, 504)
    ),
    Case("ticket > 400", "400 direct prefill-busy: no (d0)", "d0", outcome="refused", busy="p0"),
    Case("ticket > hangs-up ok", "200 direct prefill-busy d1 d1: all", "d0 d0 d1", "decode d0 broken", "d0", busy="p0"),
    Case("ticket > hangs-up ok", "200 p-first default p0 d1: all", "d0 d0 p0 d1<p0", f"decode d0 broken, {NO_D}",
         "d0", busy="p0 d1"),
]  # fmt: skip

CLIENT_LEAVES = [
    Case("silent > ok", "", "p0", "client left prefill", closed="p0", outcome="client_gone", leaves="p0"),
    Case("ticket-stands > silent", "", "p0 d0<p0", "client left decode, release ok", closed="p0 d0",
         outcome="client_gone", leaves="d0"),
    Case("ticket-stands > stands", "", "p0 d0<p0", "client left stream", closed="p0 d0", outcome="client_gone",
         stream=True, leaves="stream"),
    Case("ticket > stands", "", "p0 d0<p0", "client left decode, release ok", closed="d0", outcome="client_gone",
         stream=False, leaves="d0"),
    Case("ticket > silent", "", "d0?", "client left decode", closed="d0", outcome="client_gone", order="d-first",
         leaves="d0"),
    Case("ticket > silent", "", "d0", "client left decode", closed="d0", outcome="client_gone", busy="p0",
         leaves="d0"),
]  # fmt: skip


@pytest.mark.long_cases
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("case", "stream"),
    [
        pytest.param(case, stream, id=" ".join(filter(None, (case.nodes, case.order, "stream" * stream))))
        for case in [*P_FAILS, *D_FAILS, *NOT_ILL, *DOWN, *READ_BY_D, *CLIENT_LEAVES]
        for stream in case.streams
    ],
)
async def test_a_leg_that_fails(case: Case, *, stream: bool) -> None:
    assert await case.run(stream=stream) == case.expected
