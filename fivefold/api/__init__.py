"""What `import fivefold as ff` offers, and what the verbs call: keywords in, frozen values out.

Nothing here prints. A long task reports to a callback; a bad keyword raises `FivefoldError`.
"""
