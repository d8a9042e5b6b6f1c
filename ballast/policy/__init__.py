"""Pure decisions: (view, memo) -> (actions, memo, wake_at). Nothing here can touch anything."""
