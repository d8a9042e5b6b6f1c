"""Match claims for pages with offers of ways to free them.

Memory policies of `policy.memory` use it; it imports `core` only. The code that covers claims
depends on no kind of action: an offer declares all effects of its action.

- `claim_and_offer`: `Claim` and `Offer`: need for pages, and a way to free them with its price.
- `claims`: The claims of a device: models to activate, and requests short of KV pages.
- `clearing`: Cover claims in the order of their gain, by whatever harms least.
- `coming_pages`: Forecast how many pages become free by themselves, as running requests end.
- `cover`: Cover claims by offers in order of precedence, from fixed sources or by price.
- `fair_shares`: Max-min fair shares of KV memory between models that contend for it.
- `harm`: Expected rise in weighted misses of deadlines when requests are delayed.
- `host_weights`: Weights that passes read in host memory, brought onto pages and laid back.
- `idle_segments`: The weights of idle models, segment by segment at marginal prices.
- `offers`: Sources of offers: cached prefixes, idle models, younger requests, lent pages.
- `outlook`: Forecasts of deadlines, of pages that become free, of what delays would harm.
- `page_budget`: Account for the pages that the claims of one decision can count on.
- `published_prices`: The curve of marginal prices that a device publishes to the fleet policy.
- `supply_curve`: What all sources offer for the claims of a decision, the cheapest page first.
- `work_ahead`: Deadlines, work and pages of requests in arrays.
- `starvation`: Models that run nothing, and whose requests have waited for long.
- `staged_blocks`: KV blocks of running requests as a source of pages: they go to the host.
"""
