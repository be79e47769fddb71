"""Published weights in and out: folders of transformers, read slice by slice into submeshes."""

from dflop_jax.weights.adapter import AdapterForm as AdapterForm
from dflop_jax.weights.adapter import write_adapter as write_adapter
from dflop_jax.weights.folder import Folder as Folder
from dflop_jax.weights.folder import read_config as read_config
from dflop_jax.weights.read import read_params as read_params
from dflop_jax.weights.read import read_segment as read_segment
from dflop_jax.weights.write import ModuleParams as ModuleParams
from dflop_jax.weights.write import as_in_file as as_in_file
from dflop_jax.weights.write import write_folder as write_folder
from dflop_jax.weights.write import write_segment as write_segment
