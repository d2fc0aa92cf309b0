"""Turns the API's sampling fields into `SamplingParams`, and encodes these in the request that D sends to P."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import orjson

from pd_cluster.errors import InvalidRequest, StartupError
from pd_cluster.models.json_files import read_json
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.server.bodies.schema import (
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    GenerationBody,
    PromptFields,
    decode_value,
)
from pd_cluster.server.params.beam_fields import with_beams
from pd_cluster.server.tools.output_parser import DEFAULT_OPTIONS, ParserOptions

if TYPE_CHECKING:
    from pd_cluster.server.tools.output_parser import ParserFactory

SAMPLING_PARAM = "kv_transfer_params.sampling"
_SEED_LIMIT = 1 << 63
BadWords = tuple[tuple[int, ...], ...]  # as token ids


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values for fields that a request leaves out: OpenAI's, or those of the model's generation_config.json."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def choose(cls, where: str, model_dir: Path) -> SamplingDefaults:
        """Those that `--generation-config` names. Raises StartupError."""
        if where in ("none", "vllm"):
            return cls()
        if where == "auto":
            return cls.load(model_dir)
        if not (Path(where) / "generation_config.json").is_file():
            raise StartupError(f"--generation-config {where}: there is no generation_config.json in this directory")
        return cls.load(Path(where))

    @classmethod
    def load(cls, model_dir: Path) -> SamplingDefaults:
        """Raises StartupError naming file and field for a value that no request could have, or a file without JSON.

        What means something in transformers is taken so: values for sampling with `do_sample` false are greedy, and
        `top_p` 0 leaves the likeliest token.
        """
        path = model_dir / "generation_config.json"
        if not path.is_file():
            return cls()
        given = read_json(path)
        values = {f.name: given[f.name] for f in fields(cls) if given.get(f.name) is not None}
        for name, value in values.items():
            is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
            if isinstance(value, bool) or not (is_whole or (isinstance(value, float) and name != "top_k")):
                kind = "an integer" if name == "top_k" else "a number"
                raise StartupError(f"{path}: {name} must be {kind}, not {value!r}")
        if given.get("do_sample") is False and values.keys() - {"repetition_penalty"}:
            values["temperature"] = 0.0
        if values.get("top_p") == 0:
            values |= {"top_p": 1.0, "top_k": 1}
        if values.get("top_k") == -1:
            values["top_k"] = 0
        try:
            typed: dict[str, Any] = {k: int(value) if k == "top_k" else float(value) for k, value in values.items()}
            defaults = cls(**typed)
            SamplingParams(max_tokens=1, **asdict(defaults)).validate(vocab_size=1)
        except (InvalidRequest, OverflowError) as error:
            raise StartupError(
                f"{path}: {error}; requests that do not set it would fail: mend it, or give --generation-config none"
            ) from error
        return defaults

    @property
    def line(self) -> str:
        """The line of the start."""
        values = ", ".join(f"{name} {value:g}" for name, value in asdict(self).items())
        return f"sampling of requests that do not say otherwise: {values}"


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How tokens become the client's text. The engine does not know them."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    parser: ParserFactory | None = None  # None: the text is the content
    parser_options: ParserOptions = DEFAULT_OPTIONS


def text_options(body: GenerationBody, parser: ParserFactory | None, options: ParserOptions) -> TextOptions:
    """The TextOptions of a request. Raises InvalidRequest for stop strings that are too many, too long or empty."""
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop has {len(stop)} strings; {MAX_STOP_STRINGS} are allowed", "stop")
    if any(not text for text in stop):
        raise InvalidRequest("stop must not contain an empty string", "stop")
    if any(len(text) > MAX_STOP_CHARS for text in stop):
        raise InvalidRequest(f"a stop string may have at most {MAX_STOP_CHARS} characters", "stop")
    skip_special = body.skip_special_tokens is not False
    return TextOptions(stop, bool(body.include_stop_str_in_output), skip_special, parser, options)


def check_num_tokens(num_tokens: int, max_model_len: int, param: str) -> None:
    """Raises InvalidRequest for more token ids than the model's context has."""
    if num_tokens > max_model_len:
        raise InvalidRequest(
            f"{param} has {num_tokens} tokens; this model's maximum context length is {max_model_len}",
            param,
            "context_length_exceeded",
        )


def check_room_for_output(num_prompt_tokens: int, max_model_len: int, param: str) -> None:
    """Raises InvalidRequest for a prompt without tokens, or without room for one output token."""
    if not num_prompt_tokens:
        raise InvalidRequest("the prompt has no tokens; at least one is required", param)
    if num_prompt_tokens >= max_model_len:
        raise InvalidRequest(
            f"the prompt has {num_prompt_tokens} tokens; this model's maximum context length is {max_model_len}, "
            "of which at least one must be left for the output",
            param,
            "context_length_exceeded",
        )


def sampling_params(
    body: GenerationBody,
    defaults: SamplingDefaults,
    num_prompt_tokens: int,
    grammar: str = "",
    bad_words: BadWords = (),
    *,
    logprobs: int | None,
    max_model_len: int,
    vocab_size: int,
    default_max_tokens: int | None = None,
    cuts_limit: bool = False,
    one_token: bool = False,
) -> SamplingParams:
    """The sampling parameters of a client's body, validated.

    `num_prompt_tokens` is less than `max_model_len`, see `check_room_for_output`. `default_max_tokens` applies when
    the body sets no limit; None, or more than the prompt leaves of `max_model_len`: the output may fill the rest.
    `cuts_limit`: the API requires a limit, so clients send their own: more than there is room for is cut. `one_token`:
    of a prompt that is only read or prefilled, whatever limit the body sets. Raises InvalidRequest.
    """
    room = max_model_len - num_prompt_tokens
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    wanted: int | None = 1 if one_token else getattr(body, name)
    if wanted is not None and cuts_limit:
        wanted = min(wanted, room)
    if wanted is not None and wanted > room:
        raise InvalidRequest(
            f"the prompt has {num_prompt_tokens} tokens and {name} asks for {wanted} more; "
            f"this model's maximum context length is {max_model_len} tokens",
            name,
            "context_length_exceeded",
        )
    _check_seed(body.seed)
    top_k = _or(body.top_k, defaults.top_k)
    sampling = SamplingParams(
        max_tokens=min(room, default_max_tokens or room) if wanted is None else wanted,
        n=_or(body.n, 1),
        temperature=_or(body.temperature, defaults.temperature),
        top_p=_or(body.top_p, defaults.top_p),
        top_k=0 if top_k == -1 else top_k,
        min_p=_or(body.min_p, defaults.min_p),
        repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        seed=body.seed,
        logit_bias=body.logit_bias or {},
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        bad_words=bad_words,
        min_tokens=_or(body.min_tokens, 0),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        grammar=grammar,
        logits_args=body.logits_args or {},
        logprobs=logprobs,
    )
    if body.use_beam_search:
        sampling = with_beams(sampling, body)
    sampling.validate(vocab_size)
    if sampling.min_tokens > sampling.max_tokens and not one_token:
        raise InvalidRequest(
            f"min_tokens is {sampling.min_tokens}, and the request may generate {sampling.max_tokens} tokens",
            "min_tokens",
        )
    return sampling


def last_tokens(prompt: list[int], body: PromptFields) -> list[int]:
    """The prompt, cut to its last `truncate_prompt_tokens` ids if the body says so."""
    return prompt if body.truncate_prompt_tokens is None else prompt[-body.truncate_prompt_tokens :]


def encode_sampling(sampling: SamplingParams) -> orjson.Fragment:
    """`sampling` as D sends it to P in `kv_transfer_params`: whatever differs from its default, a new field too."""
    return orjson.Fragment(msgspec.json.encode(sampling))


def decode_sampling(raw: bytes) -> SamplingParams:
    """The counterpart of `encode_sampling`, on P. The ranges are not checked: see `SamplingParams.validate`.

    Raises InvalidRequest for a wrong type and for a field that this node does not know: a newer D must prefill
    elsewhere, because P would otherwise sample the first token without that field.
    """
    sampling: SamplingParams = decode_value(raw, SamplingParams, SAMPLING_PARAM)
    _check_seed(sampling.seed)
    return sampling


def _check_seed(seed: int | None) -> None:
    if seed is not None and not -_SEED_LIMIT <= seed < _SEED_LIMIT:
        raise InvalidRequest("seed must fit into 64 bits", "seed")


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
