"""How much load one deployment carries: the largest rate that keeps its objectives, with an interval.

``max_rate`` searches it with replications and common random numbers, ``min_replicas`` finds how many equal replicas a
trace needs; ``sampling`` draws requests at a rate and thins traces, ``evaluate`` prices one such run.
"""
