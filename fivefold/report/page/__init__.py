"""The page of `fivefold observe`: what can be asked, what is answered, and how it is shown."""
