"""The parts of the node's HTTP side. Built once and handed to `create_app`; there are no globals."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pd_cluster.errors import AdapterAbsent, EngineUnavailable, InvalidRequest, ModelNotFound, StartupError
from pd_cluster.models.model_task import SCORE, ModelTask, read_task
from pd_cluster.scheduling.turns import crowd_limit
from pd_cluster.server.grammar.grammar_checks import GrammarChecks
from pd_cluster.server.node.feed_hub import FeedHub
from pd_cluster.server.node.metrics import NodeMetrics
from pd_cluster.server.node.node_adapters import NodeAdapters
from pd_cluster.server.node.node_role import NodeRole
from pd_cluster.server.node.read_window import ReadWindow
from pd_cluster.server.node.stream_version import settings_digest, stream_version
from pd_cluster.server.params.sampling import SamplingDefaults
from pd_cluster.server.text.tokenizer import Tokenizer
from pd_cluster.server.tools.known_formats import find_format
from pd_cluster.server.tools.output_parser import load_parser
from pd_cluster.server.tools.template_parser import template_parser
from pd_connectors.protocol.keys import load_cluster_key
from pd_http.body import longest_body
from pd_http.body_turns import BodyTurns
from pd_http.held_bytes import HeldBytes

if TYPE_CHECKING:
    import aiohttp

    from pd_cluster.config import NodeConfig
    from pd_cluster.engine.client import EngineClient
    from pd_cluster.protocol.messages import EngineReady
    from pd_cluster.server.tools.output_parser import ParserFactory
    from pd_cluster.server.tools.tool_format import ToolFormat

logger = logging.getLogger("pd_cluster.server")
MAX_BODY_BYTES = 64 << 20


@dataclass(slots=True, kw_only=True)
class NodeState:
    """Fixed for the life of the node, except `draining` (set when the node stops), `role` and `num_in_flight`."""

    config: NodeConfig  # with model directory, served name and node id filled in
    engine: EngineClient
    tokenizer: Tokenizer
    key: bytes  # the cluster's
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    output_parser: ParserFactory | None = None  # of chat answers
    tool_format: ToolFormat | None = None  # of the model, None: not known
    task: ModelTask = field(default_factory=ModelTask)
    read_window: ReadWindow = field(init=False)
    grammar_checks: GrammarChecks = field(init=False)
    role: NodeRole = field(init=False)
    adapters: NodeAdapters = field(init=False)
    feed: FeedHub = field(init=False)
    metrics: NodeMetrics = field(default_factory=NodeMetrics)
    held: HeldBytes = field(init=False)
    created_s: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    num_in_flight: int = 0
    settings_digest: bytes = field(init=False)  # see `stream_version`
    turns: BodyTurns = field(default_factory=BodyTurns)
    peers: aiohttp.ClientSession | None = None  # to prefill nodes; the app's lifespan opens and closes it

    def __post_init__(self) -> None:
        self.role = NodeRole(self.config.server.role, self.engine.send)
        self.adapters = NodeAdapters(self.config.lora, self.engine, (*self.model_names, self.config.model.model))
        self.feed = FeedHub(self.engine, self.role, self.adapters, self.tokenizer.chat_template.last_turn)
        self.grammar_checks = GrammarChecks(Path(self.config.model.model), self.tokenizer.vocab_size)
        self.read_window = ReadWindow(crowd_limit(self.config.scheduler.max_waiting) // 2)
        self.held = HeldBytes(self.config.http.max_held_bytes)
        self.metrics.http.export_held(self.held)
        self.settings_digest = settings_digest(
            self.config, self.model_name, self.tokenizer, self.defaults, self.tool_format
        )

    @classmethod
    def load(cls, config: NodeConfig, engine: EngineClient) -> NodeState:
        """Reads output parser, cluster key, tokenizer and sampling defaults (seconds). Raises StartupError."""
        model_dir = Path(config.model.model)
        output_parser = load_parser(config.server.output_parser)
        try:
            key = load_cluster_key(config.handoff.cluster_key_file)
        except (OSError, ValueError) as error:
            raise StartupError(f"the cluster key cannot be read: {error}") from error
        tokenizer = Tokenizer.load(model_dir, config.model.chat_template)
        if tokenizer.chat_template.exists:
            logger.info("chat template: %s", tokenizer.chat_template.find_all_traits())
        choice = config.server.tool_format
        task = read_task(config.model.task, model_dir)
        if task.name == SCORE and task.yes_id is None:
            task = replace(task, yes_id=tokenizer.id_of("yes"), no_id=tokenizer.id_of("no"))
        tool_format = find_format(_model_type(model_dir), tokenizer.chat_template.texts, choice)
        if output_parser is None:
            file = config.server.response_template
            output_parser = template_parser(tokenizer, tool_format, file, enabled=choice != "none")
        defaults = SamplingDefaults.choose(config.model.generation_config, model_dir)
        logger.info("%s", defaults.line)
        return cls(
            config=config,
            engine=engine,
            tokenizer=tokenizer,
            key=key,
            defaults=defaults,
            output_parser=output_parser,
            tool_format=tool_format,
            task=task,
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.config.model.served_model_name or (Path(self.config.model.model).name,)

    @property
    def model_name(self) -> str:
        """The name in answers."""
        return self.model_names[0]

    @property
    def node_id(self) -> str:
        server = self.config.server
        return server.node_id or f"{server.role}-{server.host}-{server.port}"

    @property
    def ready(self) -> EngineReady:
        """Raises EngineUnavailable while the engine starts and after it died."""
        ready = self.engine.ready
        if ready is None or not self.engine.alive:
            raise EngineUnavailable("the engine is still starting" if ready is None else "the engine is gone")
        return ready

    def stream_version(self, ready: EngineReady) -> str:
        """Equal on nodes that write the same answers."""
        return stream_version(self.settings_digest, ready.fingerprint, ready.max_model_len)

    @property
    def max_body_bytes(self) -> int:
        """The longest request body that is read."""
        ready = self.engine.ready
        if ready is None:
            return MAX_BODY_BYTES
        return min(longest_body(ready.max_model_len), MAX_BODY_BYTES)

    def check_task(self, task: str, what: str) -> None:
        """Raises InvalidRequest unless the node serves this task. `what`: the plural of what it gives."""
        if self.task.name != task:
            raise InvalidRequest(
                f"this node serves its model with --task {self.task.name}; {what} need a node with --task {task}",
                code="unsupported_task",
            )

    def name_for(self, model: str | None) -> str:
        """The name in the answer to a request for `model`."""
        return model if model and self.adapters.digest_of(model) else self.model_name

    def check_model(self, name: str | None, *, is_routed: bool = False) -> None:
        """Raises ModelNotFound. A request without a model gets the node's model.

        `is_routed`: a router has sent it here for that name, so the name was an adapter's. Raises AdapterAbsent.
        """
        if name and name not in (*self.model_names, self.config.model.model) and not self.adapters.digest_of(name):
            if is_routed:
                raise AdapterAbsent(f"this node has no adapter {name!r} now: another one may have it")
            raise ModelNotFound(f"the model `{name}` does not exist: this node serves `{self.model_name}`")


def _model_type(model_dir: Path) -> str:
    try:
        return str(json.loads((model_dir / "config.json").read_text()).get("model_type", ""))
    except (OSError, ValueError, AttributeError):
        return ""  # the engine says what is wrong with it
