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


# When, and the tokens of the chunk of prefill that was scheduled then; 0: it was preempted.
SequenceEvent = tuple[float, int]


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


# Upper edges of the histogram buckets of steps in Stats; one more bucket takes the rest.
STEP_SECONDS_EDGES = (
    0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5,
    1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
STEP_TOKENS_EDGES = tuple(float(2**power) for power in range(15))


class GraphCounts(Struct):
    """What an executor counts of its CUDA graphs, since it was loaded."""

    captures: int = 0
    steps_without: int = 0
    steps_in_larger: int = 0  # in one for more tokens or rows: there was none of their own size

    def reset(self) -> None:
        self.captures = self.steps_without = self.steps_in_larger = 0


class ImageCounts(Struct):
    """What an executor counts of images, since it was loaded."""

    encoded: int = 0
    seconds: float = 0.0  # of the encoder

    def reset(self) -> None:
        self.encoded = 0
        self.seconds = 0.0


class Stats(Struct, frozen=True, array_like=True):
    """Current gauges, and counters since the engine started."""

    running: int = 0
    waiting: int = 0
    pages_used: int = 0  # referenced by a running sequence
    pages_total: int = 0
    steps: int = 0
    step_tokens: int = 0  # tokens in the last step
    step_seconds: float = 0.0  # duration of the last step
    prompt_tokens: int = 0  # computed or cached, counted when scheduled first
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    step_seconds_counts: tuple[int, ...] = ()  # steps in each bucket; () before the first step
    step_seconds_sum: float = 0.0
    step_tokens_counts: tuple[int, ...] = ()
    step_tokens_sum: int = 0
    steps_without_graph: int = 0
    steps_in_larger_graph: int = 0  # there was none of their own size yet
    graphs_captured_while_decoding: int = 0  # each would delay those rows: always 0
    step_predictions: int = 0  # steps whose time was predicted, and
    step_prediction_error: float = 0.0  # the sum of |measured / predicted - 1| of those
    # Of `pages_used`, those of each group of layers; and the others that prefixes may hit.
    group_pages_used: tuple[int, ...] = ()
    group_pages_cached: tuple[int, ...] = ()
    states_used: int = 0  # recurrent states of running sequences
    snapshots_used: int = 0  # snapshots of recurrent states that prefixes may hit
    images_encoded: int = 0
    image_cache_hits: int = 0
    image_encoder_seconds: float = 0.0


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


class StepSeconds(Struct, frozen=True, array_like=True):
    """The time of a step: see runtime/scheduler/step_time.py."""

    step: float  # of any size
    row: float  # each decode row
    prompt_token: float
    kv_token: float
    pair: float


class EngineLoad(Struct, frozen=True, array_like=True, tag="load"):
    """What an engine that is one of several has to do, and which prefixes it has cached."""

    work: Work = Work()  # of all its requests
    received: int = 0  # requests of this API process since it said Hello, counted in `work`
    times: StepSeconds | None = None  # None: not known yet
    answer_tokens: float = 0.0  # of an answer, on average; 0: not known yet
    # Hashes of pages, 16 bytes each, that were cached or evicted since the last message.
    stored: bytes = b""
    dropped: bytes = b""


class SequenceState(Struct, frozen=True, array_like=True):
    """A sequence in the engine, for the dashboard."""

    id: int
    state: Literal["waiting", "prefill", "decode", "held"]
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    known_tokens: int  # of prompt and answer
    num_pages: int
    preemptions: int
    events: list[SequenceEvent]


class PageMap(Struct, frozen=True, array_like=True):
    """The KV pages in the order of their memory, in cells of as many pages each.

    `runs` are pairs of a kind and the number of consecutive cells of it: FREE, CACHED, SHARED, or
    FIRST_OWNER + i for pages that belong to sequence i alone.  A cell is of the kind that most of
    its pages are of.
    """

    pages_per_cell: int
    runs: list[int]
    free: int  # pages without content, and
    cached: int  # with content that a prefix may hit; both may be taken by any sequence
    shared: int  # by several sequences
    owned: int  # by one


FREE, CACHED, SHARED, FIRST_OWNER = range(4)


class StepSample(Struct, frozen=True, array_like=True):
    """The time of a step, and what it depends on: see runtime/scheduler/step_time.py."""

    seconds: float
    rows: int
    prompt_tokens: int
    kv_tokens: int
    pairs: float
    encoder_stages: int = 0
    encoder_operations: float = 0.0
    has_images: int = 0


class PlanPicture(Struct, frozen=True, array_like=True):
    """A split plan of the rows that decode.  Times are in blocks of KV that a program reads."""

    planner: str
    makespan: float
    combine: float
    # Of each program: row, eighths of a block, row, eighths of a block, ...
    programs: list[list[int]]


class WavePicture(Struct, frozen=True, array_like=True):
    """What each program of a decode step reads, and what FlashAttention-3's rule would let it."""

    device: str
    runs_here: bool  # False: it is the plan that this GPU would get
    sms: int
    programs: int
    block: int  # tokens
    block_us: float
    lower_bound: float  # of every plan's makespan
    rows: list[int]  # the request of each row
    kv_tokens: list[int]  # of each row
    plan: PlanPicture
    fa3: PlanPicture


class Snapshot(Struct, frozen=True, array_like=True, tag="snapshot"):
    """The engine at one moment, for dashboards; sent while one is open."""

    at: float
    stats: Stats
    sequences: list[SequenceState]  # those with a slot, whose place numbers them in `pages`;
    waiting: list[SequenceState]  # and the first of those that wait
    pages: PageMap
    steps: list[StepSample]  # the last ones
    # Seconds of a step and of each unit of StepSample's load, in its order; () if unknown.
    weights: tuple[float, ...]
    wave: WavePicture | None  # None: no row decodes, or there is no plan for this model
    shares: list[tuple[int, bytes]]  # of API processes, by index
    build_seconds: float  # of CPU time, that it took to make this


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
