"""Published weights put to the proof: read into shards, written again, run beside transformers."""
