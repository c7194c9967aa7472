"""A local what-if page: knobs of a deployment and its load, and what the simulator says of them at once.

``question`` reads what the page asks, ``answers`` computes it, ``worker`` does so in a process of its own, ``desk``
hands questions to that process (the latest wins), ``app`` and ``server`` speak HTTP on the loopback interface.
"""
