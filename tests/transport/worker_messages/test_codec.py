"""Messages arrive as they were sent, and nothing else is taken for one."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.core.actions import (
    ActivateCommand,
    Change,
    EvictCommand,
    Lend,
    Recall,
    ReleaseMemory,
    ScrubKv,
)
from ballast.core.command import Add, CommandOutcome, DeviceCommand, Remove
from ballast.core.cost import Traffic
from ballast.core.event import CancelledOutput, FailedOutput, FinishedOutput, TokenOutput
from ballast.core.report import DeviceReport, ModelReport
from ballast.core.request import Sampling, Submission
from ballast.core.settings import DeviceSettings, FleetSettings, LinkSettings, ModelSettings, Slo
from ballast.transport.decoding import MalformedMessage
from ballast.transport.worker_messages.admin_messages import CommandDoneMsg, CommandMsg
from ballast.transport.worker_messages.codec import (
    ToServer,
    ToWorker,
    decode_to_server,
    decode_to_worker,
    encode,
)
from ballast.transport.worker_messages.lending_messages import (
    MeetPeerMsg,
    PeerEndedMsg,
    PeerReportMsg,
)
from ballast.transport.worker_messages.lifecycle_messages import (
    ConfigureMsg,
    DrainedMsg,
    DrainMsg,
    HelloMsg,
    NotReadyMsg,
    ReadyMsg,
    StatusMsg,
    StopMsg,
)
from ballast.transport.worker_messages.request_messages import (
    FlowControlMsg,
    OutputsMsg,
    SubmitMsg,
    WithdrawMsg,
)
from tests.cluster.fake_device import spec

FLEET = FleetSettings(
    models=(ModelSettings(name="a", path="p", slo=Slo(ttft=1.5), max_model_len=128, pinned=True),),
    device=DeviceSettings(budget_bytes=2**33, threads=2),
    link=LinkSettings(bytes_per_second=1e9),
    options={"x": 0.5},
)
SUBMISSION = Submission(
    id="r-0",
    model="a",
    prompt=(1, 2, 3),
    max_tokens=7,
    sampling=Sampling(temperature=0.7, top_p=0.9, top_k=5, seed=2**63 - 1, choice=2),
    stop_token_ids=(9,),
    ignore_eos=True,
    salt="s",
)
REPORT = DeviceReport(
    device="cpu:0",
    now=1.25,
    page_bytes=4096,
    total=10,
    free=3,
    reclaiming=1,
    owners={"kv:a": 6},
    models=(
        ModelReport(
            name="a",
            residency="resident",
            weight_pages=0,
            kv_pages=6,
            cached_pages=2,
            waiting=1,
            running=2,
            late=1,
            lane_seconds=0.5,
            activations=3,
            evictions=4,
            preemptions=5,
            prompt_tokens=6,
            cached_tokens=7,
            output_tokens=8,
            layers=12,
            resident_layers=8,
            rotating_layers=4,
            absent_layers=3,
            lent_pages=9,
            loads=10,
            loaded_bytes=11,
            copy_seconds=0.75,
            stall_seconds=0.125,
            traffic=Traffic(0.5, 12.5, 3.25),
        ),
    ),
    jobs=11,
    draining=False,
)
OUTPUTS = [
    TokenOutput("r-0", 5, 0, -0.25),
    TokenOutput("r-0", 6, 1),
    FinishedOutput("r-0", "length", 3, 2, 1, 0),
    FinishedOutput("r-2", "length", 90, 2, 64, 0, (("host", 48), ("disk", 16))),
    FailedOutput("r-1", "internal_error", "why"),
    CancelledOutput("r-2"),
]


@pytest.mark.parametrize(
    "message",
    [
        ConfigureMsg(FLEET, 10),
        SubmitMsg.of((SUBMISSION,)),
        WithdrawMsg(("r-0", "r-1")),
        FlowControlMsg(paused=("r-0",)),
        FlowControlMsg(resumed=("r-0", "r-1")),
        DrainMsg(),
        StopMsg("why"),
        MeetPeerMsg("cpu:1", 2, "ballast-pages-0"),
        PeerEndedMsg("cpu:1", 2),
    ],
)
def test_messages_to_the_worker_arrive_as_sent(message: ToWorker) -> None:
    assert decode_to_worker(encode(message)) == message


def test_what_choices_share_crosses_once() -> None:
    prompt, grammar = tuple(range(5000)), "start: " + "x" * 5000
    one = replace(SUBMISSION, prompt=prompt, sampling=Sampling(grammar=grammar, seed=3))
    other = replace(SUBMISSION, id="other", prompt=tuple(range(7)), sampling=Sampling())
    choices = [
        replace(one, id=f"c{i}", sampling=replace(one.sampling, choice=i)) for i in range(128)
    ]
    sent = encode(SubmitMsg.of([*choices, other]))
    assert len(sent) < len(encode(SubmitMsg.of([one, other]))) + 128 * 500
    received = decode_to_worker(sent)
    assert isinstance(received, SubmitMsg)
    found = received.unwrap()
    assert found == [*choices, other]
    assert len({id(s.prompt) for s in found}) == len({id(s.sampling.grammar) for s in found}) == 2


def test_requests_without_what_they_name_are_refused() -> None:
    sent = SubmitMsg.of([SUBMISSION])
    for wrong in (
        msgspec.structs.replace(sent, prompt_of=(1,)),
        msgspec.structs.replace(sent, grammar_of=(5,)),
        msgspec.structs.replace(sent, prompt_of=()),
    ):
        received = decode_to_worker(encode(wrong))
        assert isinstance(received, SubmitMsg)
        with pytest.raises(MalformedMessage):
            received.unwrap()


@pytest.mark.parametrize(
    "message",
    [
        HelloMsg(123),
        ReadyMsg({"a": spec("a")}, {"b": "why"}, REPORT),
        NotReadyMsg("why"),
        StatusMsg(REPORT, ({"at": 1.5, "action": "Evict", "model": "a", "pages": None},)),
        OutputsMsg.of(OUTPUTS),
        DrainedMsg(),
        PeerReportMsg("released", "cpu:1", 2),
    ],
)
def test_messages_to_the_server_arrive_as_sent(message: ToServer) -> None:
    assert decode_to_server(encode(message)) == message


CHANGE = Change(model="a", slo=Slo(), priority=1, max_waiting=5, queue_seconds=2.5, pinned=True)


@pytest.mark.parametrize(
    "order",
    [
        Add(FLEET.models[0]),
        Remove("a", 2.5),
        CHANGE,
        ActivateCommand("a"),
        EvictCommand("a", "why"),
        Lend("cpu:1", 3),
        Recall("cpu:1", None, 2.5),
        ScrubKv("m", "key"),
        ReleaseMemory(1024),
    ],
)
def test_orders_and_what_came_of_them_arrive_as_sent(order: DeviceCommand) -> None:
    arrived = decode_to_worker(encode(CommandMsg.of(7, order)))
    assert isinstance(arrived, CommandMsg)
    assert (arrived.id, arrived.order) == (7, order)
    done = CommandDoneMsg(7, CommandOutcome("refused", "why", {"a": spec("a")}, {"b": "c"}, 8))
    assert decode_to_server(encode(done)) == done


def test_a_command_has_one_order() -> None:
    for command in (
        CommandMsg(1),
        CommandMsg(1, activate=ActivateCommand("a"), evict=EvictCommand("a")),
    ):
        with pytest.raises(MalformedMessage, match="orders"):
            assert command.order


def test_outputs_keep_their_kind_and_order() -> None:
    arrived = decode_to_server(encode(OutputsMsg.of(OUTPUTS)))
    assert isinstance(arrived, OutputsMsg)
    assert arrived.unwrap() == OUTPUTS


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"type": "Nonsense"}),
        msgspec.msgpack.encode({"type": "WithdrawMsg", "request_ids": [1]}),
        msgspec.msgpack.encode({"type": "WithdrawMsg"}),
        msgspec.msgpack.encode({"type": "DrainMsg", "more": 1}),
        encode(StatusMsg(REPORT)),
    ],
)
def test_what_breaks_the_schema_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode_to_worker(data)


@given(st.binary(max_size=200))
def test_noise_is_refused_not_believed(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode_to_worker(data)
