"""What can go wrong with a link, one class per file; `catalogue` names them, `active` runs them."""
