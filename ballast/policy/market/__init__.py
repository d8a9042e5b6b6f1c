"""Match needs for pages with ways to free them: claims are covered by offers.

Memory policies of `policy.memory` use it; it imports `core` only. The code that covers claims knows
no kind of action: an offer declares all that it does.

- `claim_and_offer`: `Claim` and `Offer`: need for pages, and a way to free them with its price.
- `claims`: The claims of a device: models to activate, and requests that cannot go on.
- `cover`: Cover claims by offers in order of precedence, from fixed sources or by price.
- `fair_shares`: Max-min fair shares of KV memory between models that contend for it.
- `offers`: Sources of offers: cached prefixes, idle models, younger requests, lent pages.
- `page_budget`: Pages that the claims of one decision can count on.
"""
