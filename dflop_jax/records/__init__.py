"""The frozen records that flow from stage to stage.

Every arrow of the data flow (profile -> plan -> schedule -> trace) is one of these. A record
validates itself when made, so a wrong one cannot exist; `record_files` writes and reads it as
versioned JSON, so every stage can run alone from a file. No record knows a modality: modules are
names, joined by the edges that the model declares.
"""

from dflop_jax.records.as_json import from_json, from_plain, to_json
from dflop_jax.records.data import (
    Bucket,
    DataProfile,
    Load,
    Shape,
    first_pieces,
    numbered,
    piece_tokens,
)
from dflop_jax.records.features import (
    CONTENT,
    by_feature,
    content_of,
    content_s,
    pairs,
    shape_features,
    times,
)
from dflop_jax.records.hardware import PLANNED_SHARE, USABLE_MEMORY, Collective, Hardware, Link
from dflop_jax.records.hidden import rank_share, token_dim
from dflop_jax.records.mesh import AXES, MANUAL_AXES, MeshShape, SubmeshPlan
from dflop_jax.records.pieces import PiecePlaces
from dflop_jax.records.plan import (
    REMAT,
    ZERO,
    Edge,
    ExchangeRoom,
    Grouping,
    Kept,
    Layout,
    Plan,
    Predicted,
    Remat,
    Scheduling,
    SegmentPlan,
    Zero,
    home_rank,
    with_remat,
)
from dflop_jax.records.prices import Price, PriceList, Prices, ProgramId, SendId, with_host_work
from dflop_jax.records.profile import LayerTiming, ModelProfile, ParamDims, Profile, Recompute
from dflop_jax.records.schedule import (
    BACKWARD,
    FORWARD,
    NO_GROUP,
    REDUCE,
    UPDATE,
    Direction,
    Group,
    Maker,
    Schedule,
    Status,
    Task,
)
from dflop_jax.records.trace import RETURN, SEND, Event, Trace
from dflop_jax.records.traffic import crossing, homes, rank_nodes, traffic

__all__ = [
    "AXES",
    "BACKWARD",
    "CONTENT",
    "FORWARD",
    "MANUAL_AXES",
    "NO_GROUP",
    "PLANNED_SHARE",
    "REDUCE",
    "REMAT",
    "RETURN",
    "SEND",
    "UPDATE",
    "USABLE_MEMORY",
    "ZERO",
    "Bucket",
    "Collective",
    "DataProfile",
    "Direction",
    "Edge",
    "Event",
    "ExchangeRoom",
    "Group",
    "Grouping",
    "Hardware",
    "Kept",
    "LayerTiming",
    "Layout",
    "Link",
    "Load",
    "Maker",
    "MeshShape",
    "ModelProfile",
    "ParamDims",
    "PiecePlaces",
    "Plan",
    "Predicted",
    "Price",
    "PriceList",
    "Prices",
    "Profile",
    "ProgramId",
    "Recompute",
    "Remat",
    "Schedule",
    "Scheduling",
    "SegmentPlan",
    "SendId",
    "Shape",
    "Status",
    "SubmeshPlan",
    "Task",
    "Trace",
    "Zero",
    "by_feature",
    "content_of",
    "content_s",
    "crossing",
    "first_pieces",
    "from_json",
    "from_plain",
    "home_rank",
    "homes",
    "numbered",
    "pairs",
    "piece_tokens",
    "rank_nodes",
    "rank_share",
    "shape_features",
    "times",
    "to_json",
    "token_dim",
    "traffic",
    "with_host_work",
    "with_remat",
]
