"""What a run needs beside the step: the optimizer, and how ranks are started."""
