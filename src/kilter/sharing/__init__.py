"""Fair sharing: several training jobs on the GPUs of one machine, with similar slow-downs.

The knob is the data ratio of a job: how its global batch splits over the GPUs, in tenths.
"""
