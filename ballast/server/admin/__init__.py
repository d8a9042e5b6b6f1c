"""Change what the fleet serves: carry out operators' changes, and record them durably.

`server` alone imports it.

- `added_models`: Resolves the models and adapters that an operator adds.
- `admin_service`: Carries out changes by operators or by the fleet file.
"""
