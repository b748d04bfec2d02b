"""Leads the two stock models along a text, and compares the candidate's steps with theirs."""

from __future__ import annotations

import torch
from torch import Tensor

from flashnorm_triton.lag import judging, steps
from flashnorm_triton.lag.judging import SiteSteps
from flashnorm_triton.lag.sites import Site, scale_of
from flashnorm_triton.lag.stepping import Text
from flashnorm_triton.lag.steps import Steps
from flashnorm_triton.lag.taps import Taps, inputs_of
from flashnorm_triton.lag.trio import Trio


class Follower:
    """Keeps a chunk of the candidate's logits and tapped rows, then only figures of them.

    ``batch`` rows of up to ``length`` tokens; ``chunk`` steps at a time. To be ``close``d: it has
    hooks on the candidate.
    """

    def __init__(self, trio: Trio, sites: list[Site], batch: int, length: int, chunk: int) -> None:
        self.trio, self.sites = trio, sites
        self._sizes = (batch, length)
        self._chunk = chunk
        places = [place for site in sites for place in site.places]
        self._taps = Taps(trio.candidate, places, batch, chunk)
        self._logits: Tensor | None = None
        self._steps: list[Steps] = []
        self._figures: dict[Site, list[SiteSteps]] = {}

    def close(self) -> None:
        """Take the hooks off."""
        self._taps.remove()

    def results(self) -> tuple[Steps, dict[Site, SiteSteps]]:
        """Every step's figures, of the logits and of the sites that the model was seen to run."""
        sites = {site: judging.joined(parts) for site, parts in self._figures.items()}
        return steps.joined(self._steps), sites

    def begin(self, prompt: Tensor, mask: Tensor | None, logits: Tensor) -> None:
        """A new text: prompt (B, P), and the candidate's logits (B, V) after it."""
        self._reference = Text(self.trio.reference, "dynamic", *self._sizes, mask)
        self._control = Text(self.trio.control, "dynamic", *self._sizes, mask)
        wanted, inputs = self._led(self._reference, prompt)
        control, _ = self._led(self._control, prompt)
        self._steps.append(steps.compare(logits[None], control[-1:], wanted[-1:], wanted[-2]))
        self._wanted = wanted[-1]
        self._visible = [
            site
            for site in self.sites
            if site.norm in inputs and all(self._taps.seen(place) for place in site.places)
        ]
        for site in self._visible:
            self._figures.setdefault(site, []).append(judging.nothing(len(prompt)))
        # The inputs one step before the next chunk, of the reference and of the candidate.
        self._inputs = {path: rows[-1] for path, rows in inputs.items()}
        self._tapped = {
            site: self._taps.by_place[site.norm, True].last.clone() for site in self._visible
        }

    def keep(self, place: int, logits: Tensor) -> None:
        """Store the candidate's step number ``place`` of the chunk: logits (B, V), tapped rows."""
        if self._logits is None:
            self._logits = logits.new_empty(self._chunk, *logits.shape)
        self._logits[place].copy_(logits)
        self._taps.keep(place)

    def compare(self, ids: Tensor) -> None:
        """Compare the chunk that was kept; ids (B, T) are the tokens that it was fed."""
        count = ids.shape[1]
        wanted, inputs = self._led(self._reference, ids)
        control, control_inputs = self._led(self._control, ids)
        logits = self._logits[:count]
        self._steps.append(steps.compare(logits, control, wanted, self._wanted))
        self._wanted = wanted[-1]
        rows = {
            site: torch.cat([self._tapped[site][None], self._taps.kept[site.norm, True][:count]])
            for site in self._visible
        }
        scales = {site: scale_of(site, rows[site].to(self.trio.wide)) for site in self._visible}
        last = [site for site in self._visible if site.fused and scales[site] is not None]
        for site in self._visible:
            stock = torch.cat([self._inputs[site.norm][None], inputs[site.norm]])
            outputs = [self._taps.kept[path, False][:count] for path in site.outputs]
            before = self._scale_before(site, last, scales)
            entering = judging.of_input(rows[site], stock, control_inputs[site.norm])
            leaving = judging.of_output(site, rows[site], outputs, scales[site], before, self.trio)
            self._figures[site].append(judging.figures(entering, leaving))
            self._inputs[site.norm], self._tapped[site] = inputs[site.norm][-1], rows[site][-1]

    def _scale_before(
        self, site: Site, fused: list[Site], scales: dict[Site, Tensor | None]
    ) -> Tensor | None:
        """The scales (T, B) that were written last before this site's: its forerunner's at the same
        step, for the first site the last one's at the step before."""
        if site not in fused or len(fused) < 2:
            return None
        place = fused.index(site)
        return scales[fused[place - 1]][1:] if place else scales[fused[-1]][:-1]

    def _led(self, text: Text, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits (T, B, V) of ids (B, T), and the inputs (T, B, K) of modules called once."""
        with inputs_of(text.model, [site.norm for site in self.sites]) as seen:
            logits = text.feed(ids).transpose(0, 1)
        rows = {
            path: calls[0].reshape(*ids.shape, -1).transpose(0, 1)
            for path, calls in seen.items()
            if len(calls) == 1
        }
        return logits, rows
