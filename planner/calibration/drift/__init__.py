"""Drift: whether the same layouts, measured night after night, have become slower or faster.

A change of level is sought in the logarithm of the step time, in each layout by itself and in all
layouts of a job and of the sweep together, because a new release moves many a little. What counts
is how much nights differ from each other, not how much steps of one run do. The nights are gone
through in order, as they came: after a change that was found, the test begins anew at its first
night. So the same history gives the same findings on every later night.

The threshold follows from one number, the runs of the sweep for one false alarm, and from how many
series are watched. A run far off its neighbours by itself is an outlier: at least two nights make
a change. A host on which layouts are slower than elsewhere is told apart first and left out.
`docs/decisions/0012` says why it is done so.
Letters: A layouts, T nights, F families of layouts, K splits.
"""
