"""The whole loop on one machine, on real parts.

- ``spec``         what the demo is told, and the one JSON object it ends with
- ``corpus``       two text domains that ship with CPython
- ``tiny_target``  how the shipped target was made, and how it is moved
- ``prompts``      rollout groups and fresh prompts
- ``history``      target versions, made while the engine serves
- ``live``         what is measured on the running engine
- ``run``          the story, top to bottom
- ``report``       the closing table and the picture
- ``serve``        an earlier demo's engine, started again
- ``build_assets`` the seeded script behind ``assets/`` (target and first draft)
"""
