"""Publishing: from a registered artifact to verified weights in running engines.

Where to go:

- ``registry``      the whole: import, evidence, approve, publish, state, diff
- ``artifacts``     drafts by digest, complete or not there
- ``evidence``      documents about artifacts, decisions among them
- ``channels``      which draft is to be served: a ledger moved by compare-and-swap
- ``diff``          what differs between two artifacts
- ``gates``         is a candidate good enough? Pure decisions with every reason
- ``engines``       what publishing needs from a rollout engine, and nothing more
- ``swap``          plan, prepare, commit, verify, put back
- ``telemetry``     acceptance counters over time
- ``launch``        start a server that can be published to
- ``processes``     children that end with their parent (``die_with_parent`` is their launcher)
- ``vllm_client``   talks to a vLLM server (outside it)
- ``vllm_plugin``   runs inside vLLM's processes
"""
