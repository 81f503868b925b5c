"""The messages between an API process and the engine process.

    API process  --  Hello, EngineRequest(s), Abort, Observe  -->  engine
    engine       --  Progress, Ready, StepOutput, EngineLoad, Snapshot -->  API process
    launcher     --  EngineDown                -->  API process

Every message is a msgspec Struct, encoded as a MessagePack array.  Times are `time.monotonic()`
seconds, which all processes of one host share.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from runtime.kv_capacity import KVCapacity
from runtime.snapshot import SequenceEvent, Snapshot
from runtime.stats import Stats

FinishReason = Literal["stop", "length", "abort", "error"]

BACKGROUND = 2**31  # the priority of work that yields to all other; callers' own are lower

MAX_BANNED_TOKENS = 32  # of one banned sequence
MAX_LEXER_STATES = 50_000  # of one grammar, some 100 MB: a limit of the grammar compiler


class PoolingParams(Struct, frozen=True, array_like=True):
    """Return an embedding pooled from the prompt's hidden states after the last norm."""

    kind: Literal["last", "mean"]  # the state of the last token, or the mean of all
    dimensions: int = 0  # the first so many are kept; 0 keeps all
    normalize: bool = True  # to length 1, after the cut


class SamplingParams(Struct, frozen=True, array_like=True):
    """How to sample the tokens of one sequence.  The server has validated every range.

    `stop_ids` are the token ids that end the sequence, the model's end-of-sequence ids included
    unless the request ignores them; the id that ended it is the last one delivered.
    """

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None  # None: the engine chooses one
    min_tokens: int = 0  # stop_ids are masked before this many tokens
    stop_ids: tuple[int, ...] = ()
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None  # number of alternatives to report, 0 for the chosen token alone
    prompt_logprobs: int | None = None
    allowed_ids: tuple[int, ...] = ()  # () allows all
    # No token may complete one of these sequences of 1 .. MAX_BANNED_TOKENS ids.
    banned: tuple[tuple[int, ...], ...] = ()
    # The alternatives to report instead of the likeliest; then logprobs is their number.
    logprob_ids: tuple[int, ...] = ()
    grammar: str = ""  # constrains the answer: llguidance's JSON format; "" allows all
    pooling: PoolingParams | None = None  # with max_tokens=0: nothing is sampled

    @property
    def needs_history(self) -> bool:
        """Whether sampling depends on the earlier tokens."""
        return self.has_penalties or bool(self.banned)

    @property
    def has_penalties(self) -> bool:
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


class PromptImage(Struct, frozen=True, array_like=True, weakref=True):
    """An image of a prompt, decoded and resized to what the model sees.

    The tokens `start` to `start + num_tokens` of the prompt are placeholders, which are the same
    for every image: prompts whose tokens are equal are equal only if the digests are, too.
    """

    start: int
    num_tokens: int
    width: int  # pixels
    height: int
    pixels: bytes  # uint8 RGB [height, width, 3]
    digest: bytes  # SHA-256 of size and pixels


class EngineRequest(Struct, frozen=True, array_like=True, tag="request"):
    """One prompt and its sampling parameters (`n` completions are `n` requests)."""

    id: int  # unique among all API processes of a server
    client: int  # index of the API process that gets the outputs
    tokens: list[int]
    params: SamplingParams
    priority: int = 0  # lower runs first
    salt: bytes = b""  # prefixes are shared only between requests of the same salt
    arrived: float = 0.0
    images: tuple[PromptImage, ...] = ()  # in the order of the prompt
    # Tokens at the prompt's end that begin the answer: a later prompt may have others there.
    generation_prompt_len: int = 0


class EngineRequests(Struct, frozen=True, array_like=True, tag="requests"):
    """Requests of one API process whose prompts have the same images, which are sent once."""

    requests: list[EngineRequest]  # without their images
    images: tuple[PromptImage, ...]

    @classmethod
    def of(cls, requests: list[EngineRequest]) -> EngineRequests:
        return cls([replace(one, images=()) for one in requests], requests[0].images)

    def whole(self) -> list[EngineRequest]:
        """The requests with their images, whose bytes are there once."""
        return [replace(one, images=self.images) for one in self.requests]


class Abort(Struct, frozen=True, array_like=True, tag="abort"):
    """The caller of request `id` has gone; answered by a RequestOutput with finish="abort"."""

    id: int


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """An API process started: requests of its predecessor are aborted.  Answered by Ready."""

    client: int


class Observe(Struct, frozen=True, array_like=True, tag="observe"):
    """What an API process adds to the dashboard; see docs/dashboard.md.

    `watching`: a page is open at this process, so all API processes get a Snapshot.
    `share` is what they are to know of this process's requests; the engine passes it on unread.
    """

    client: int
    watching: bool
    share: bytes = b""


class TokenLogprob(Struct, frozen=True, array_like=True):
    """Natural log-probability of one token, and the most likely alternatives at its position."""

    logprob: float
    rank: int  # 1 for the most likely token
    top: list[tuple[int, float]]  # (token id, logprob), most likely first


class RequestOutput(Struct, frozen=True, array_like=True):
    """New tokens of one request.  The one with `finish` set is its last."""

    id: int
    tokens: list[int]
    finish: FinishReason | None = None
    stop_id: int | None = None  # the token id that ended it, when finish is "stop"
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None  # in the first output only
    cached: int = 0  # prompt tokens found in the prefix cache; in the first output only
    started: float = 0.0  # when the request was first scheduled; in the first output only
    error: str | None = None  # with finish="error"
    embedding: bytes = b""  # little-endian float32, in the only output of a pooled prompt
    preemptions: int = 0  # in the last output only, as is mean_batch
    mean_batch: float = 0.0  # mean rows a step, from its first step to its last
    is_request_error: bool = False  # with `error`: the request is invalid
    events: list[SequenceEvent] = []  # in the last output only


class StepOutput(Struct, frozen=True, array_like=True, tag="step"):
    """The outputs of one step for one API process; sent once a second when idle, as a heartbeat.

    Tokens of requests with no other output are packed arrays: `ids` are 8 bytes a token,
    `tokens` 4 bytes, both in the byte order of the host.  `ids` names a request once for each of
    its tokens, in order; they come before its output in `outputs`.
    """

    outputs: list[RequestOutput]
    stats: Stats
    ids: bytes = b""
    tokens: bytes = b""


class Work(Struct, frozen=True, array_like=True):
    """What requests have left to compute; see runtime/routing/router.py."""

    prompt_tokens: float = 0.0
    pairs: float = 0.0  # query-key pairs of these with those before them
    rows: int = 0  # answers that are not complete
    kv_tokens: float = 0.0  # that these rows read in a step
    encoder_stages: float = 0.0  # of images that are not encoded yet
    encoder_operations: float = 0.0  # 10^9, of these stages


class StepSeconds(Struct, frozen=True, array_like=True):
    """The time of a step: see runtime/scheduler/step_time.py."""

    step: float  # of any size
    row: float  # each decode row
    prompt_token: float
    kv_token: float
    pair: float
    encoder_stage: float = 0.0
    encoder_operation: float = 0.0  # 10^9 of them


class EngineLoad(Struct, frozen=True, array_like=True, tag="load"):
    """What an engine that is one of several has to do, and which prefixes it has cached."""

    work: Work = Work()  # of all its requests
    received: int = 0  # requests of this API process since it said Hello, counted in `work`
    times: StepSeconds | None = None  # None: not known yet
    answer_tokens: float = 0.0  # of an answer, on average; 0: not known yet
    # Hashes of pages, 16 bytes each, that were cached or evicted since the last message.
    stored: bytes = b""
    dropped: bytes = b""


DOWNLOAD = "download"  # the phase of Progress whose numbers are bytes


class Progress(Struct, frozen=True, array_like=True, tag="progress"):
    """What is being done before the engine is ready; of a download, by the process that does it."""

    phase: str
    done: int = 0
    total: int = 0
    seconds_left: int | None = None


class Ready(Struct, frozen=True, array_like=True, tag="ready"):
    """The engine accepts requests.  A second Ready means that it was restarted."""

    epoch: int
    model_type: str
    device: str
    dtype: str
    attention: str
    vocab_size: int
    max_model_len: int
    page_size: int
    num_pages: int
    max_num_seqs: int
    max_batched_tokens: int
    weight_bytes: int
    kv_bytes: int
    load_seconds: float
    hidden_size: int = 0  # dimensions of an embedding
    memory: list[tuple[str, int]] = []  # how the device's memory is divided, in bytes
    phases: list[tuple[str, float]] = []  # of the startup, in seconds
    layers: list[str] = []  # how quantized linear layers run, a line for each kind
    # Of each group of layers that share pages: the positions that a query sees, 0 for all.
    group_windows: tuple[int, ...] = (0,)
    num_states: int = 0  # recurrent states that sequences can have; 0: the model has none
    text_part: bool = False  # of a model that also sees images: it reads text alone here
    num_snapshots: int = 0  # of these states, from which later requests can continue
    reads_images: bool = False
    ranks: int = 1  # devices, or processes on a CPU, that share the model
    why_ranks: str = ""  # the reason for their number, which --tensor-parallel auto has chosen
    # Of each stage of the image encoder, operations in 10^9: for a token of an image, and for a
    # pair of its tokens.
    encoder_costs: tuple[tuple[float, float], ...] = ()
    all_reduce: str = ""  # how ranks add their products, if there are several
    delta_nets: str = ""  # which kernels compute gated delta nets, where a start has tried some

    @property
    def kv_capacity(self) -> KVCapacity:
        """How many pages a request needs."""
        return KVCapacity.of(self.page_size, self.group_windows, 1, self.max_batched_tokens)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the KV cache holds, in requests of the maximum length."""
        return self.kv_capacity.tokens(self.num_pages, self.max_model_len)

    def capacity_requests(self, length: int) -> float:
        """Requests of this length that the KV cache holds, and recurrent states."""
        held = self.kv_capacity.requests(self.num_pages, length)
        return min(held, self.num_states) if self.num_states else held


class EngineDown(Struct, frozen=True, array_like=True, tag="down"):
    """The engine process ended; the requests it held are lost.  Sent by the launcher."""

    reason: str
    epoch: int | None = None  # of the engine that ended: a newer one may have sent Ready already


ToEngine = Hello | EngineRequest | EngineRequests | Abort | Observe
FromEngine = StepOutput | Progress | Ready | EngineLoad | EngineDown | Snapshot
