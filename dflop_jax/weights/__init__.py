"""Read and write checkpoint folders of transformers; slices are read straight into submeshes."""

from dflop_jax.weights.adapter import write_adapter
from dflop_jax.weights.folder import Folder, read_config
from dflop_jax.weights.read import read_params, read_segment
from dflop_jax.weights.write import ModuleParams, segment_tensors, to_file_layout, write_folder
