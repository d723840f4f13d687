"""Pure decisions: state and command in, events out, or Refused."""
