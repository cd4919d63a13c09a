"""A small procedural place and the training of a model that shows it.

The place is one fixed island: the model may, and should, learn it by heart. What this proves is
the program (container, camera, prompt, drift), never that a model of this size generalises.
"""
