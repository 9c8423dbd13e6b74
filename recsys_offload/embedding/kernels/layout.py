"""How the kernels are told about features, ids and optimizers: column numbers and codes shared by both sides."""

from __future__ import annotations

# The columns of a group's int64 table of features ``[features, 5]``, sorted by table:
# which key of the batch's KeyedJaggedTensor holds the ids, the first row of the table in the group, the rows of the
# table, the first column of the feature's pooled vector in the output, and whether its bags are averaged.
KEY, BASE, SIZE, COLUMN, MEAN = range(5)
FEATURE_COLUMNS = 5

# What to do with an id outside [0, rows of its table).
INVALID_ERROR, INVALID_MODULO, INVALID_FALLBACK = range(3)

SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM = range(4)

# The columns of an update's float32 parameters.
STEP_SIZE, WEIGHT_DECAY, EPS, ONE_MINUS_BETA1, ONE_MINUS_BETA2 = range(5)
UPDATE_PARAMETERS = 5

# A row's gradients are summed in chunks of this many occurrences (see host_update.py).
CHUNK = 512
# A sum over a row's columns runs in this many interleaved sums, added pairwise: an order that vector units keep.
LANES = 8
