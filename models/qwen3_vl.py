"""Qwen3-VL (arXiv 2511.21631), dense: a tower at native resolution, DeepStack, a Qwen3 decoder.

What the modules read, as samples have to give it:

"vision": a piece is a picture, or a pair of consecutive frames of a clip, at its own resolution:
rows x columns patches of 16 x 16 pixels, both even. A picture is a pair of itself twice. A clip's
pairs are pieces of their own, in order of time; they do not see each other. Patches of a piece go
block by block, a block being 2 x 2 neighbouring patches: blocks in row order, and in a block
(top left, top right, bottom left, bottom right). Of every patch:
- patches uint8 [3 * 2 * 16 * 16], flattened (colour, frame, row, column): pixels as they come from
  the resizing; the tower normalises them to -1 to 1.
- grid int32 [4]: the patch's row and column, and the rows and columns of its piece's grid, all
  counted in patches.
A piece of p patches gives p / 4 features, one for each block, in order.

"llm": a piece is a sample's sequence of tokens. Features of "vision" stand at the placeholders
(`is_visual`), copied one to one in the order of the sample's pieces. Beside the fields of other
decoders (tokens, targets, weights, is_visual) a sample gives
- positions int32 [3]: time, row, column. A token of text has the same number three times, one more
  than the largest before it, from 0. The placeholders of a piece that begins at n have
  (n, n + row, n + column) of their block, rows and columns counted in blocks; what follows it goes
  on at n + max(rows, columns). Time stamps of a clip's pairs are text between its pieces.
"""
