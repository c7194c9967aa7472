"""The live side of validation: load a running server, or read results that exist already, into one common form.

``client`` runs a workload against an OpenAI-compatible server, ``imports`` reads what other load generators saved;
both give an ``ObservedRun``, whose metrics have the names and definitions of a simulated run's.
"""
