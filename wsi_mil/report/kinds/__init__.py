"""Reports of runs that predict other things than one class: numbers, times to an event, ordered grades, or several."""
