"""Frozen records that the stages exchange (profile -> plan -> schedule -> trace).

A record validates its fields when it is constructed. `files` saves and loads records as versioned
JSON, so every stage can run alone from a file. Records do not depend on modalities: modules are
names, connected by the edges that the model declares.
"""

from dflop_jax.records.data import (
    PAIR,
    TOKEN,
    Bucket,
    Content,
    DataProfile,
    Load,
    Shape,
    content_seconds,
    first_piece_numbers,
    order_coefficients,
    piece_content,
    piece_tokens,
    scale_coefficients,
    shape_features,
    token_pairs,
)
from dflop_jax.records.files import from_json, from_msgpack, to_json, to_msgpack
from dflop_jax.records.hardware import PLANNED_SHARE, USABLE_MEMORY, Collective, Hardware, Link
from dflop_jax.records.mesh import AXES, MANUAL_AXES, MeshShape, SubmeshPlan, token_dim, tp_share
from dflop_jax.records.plan import (
    REMAT,
    ZERO,
    Edge,
    ExchangeCapacity,
    Grouping,
    Layout,
    Plan,
    Predicted,
    Remat,
    ResidualBytes,
    Scheduling,
    SegmentPlan,
    TrialResult,
    Zero,
    with_remat,
)
from dflop_jax.records.prices import Price, PriceList, Prices, ProgramId, SendId, add_host_work
from dflop_jax.records.profile import (
    LAYERS,
    LayerTiming,
    ModelProfile,
    ParamDims,
    Profile,
    Recompute,
    layer_key,
)
from dflop_jax.records.schedule import (
    ARRIVAL_ORDER,
    BACKWARD,
    FORWARD,
    FSDP,
    LONGEST_FIRST,
    NO_GROUP,
    REDUCE,
    RETURN,
    SEND,
    UPDATE,
    Direction,
    Event,
    Group,
    PackedPieces,
    Schedule,
    ScheduleMaker,
    Status,
    Task,
    Trace,
)
from dflop_jax.records.traffic import (
    crossing_traffic,
    exchanged_features,
    home_ranks,
    rank_nodes,
    rank_traffic,
)
