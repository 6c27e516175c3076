"""Measured times of the fused and the unfused form: tables (`table.py`), a model of what lies between (`model.py`), and the command that
measures them (`command.py`). docs/tuning.md says how they are used.
"""
