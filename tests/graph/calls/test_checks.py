"""What a stage compares is what the code has decided by, and no more."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fxpipe import InputError, Pipe, SplitPoint, pipeline

LIMIT = 5
QUESTIONS: list[Callable[[Tensor], object]] = [
    lambda n: n.max().item() < 5,
    lambda n: n.max().item() <= LIMIT,
    lambda n: n.max().item() > 5,
    lambda n: n.max().item() >= LIMIT,
    lambda n: n.max().item() == 4,
    lambda n: n.max().item() != LIMIT,
    lambda n: int(LIMIT) < n.max().item(),
    lambda n: n.dim() + 4 >= n.max().item(),
    lambda n: n.max().item() > n.shape[0] + 1,
]
OF_THE_NUMBER: list[Callable[[Tensor], object]] = [
    lambda n: n.max().item() < n.min() + 4,
    lambda n: n.max().item() - 1 < 5,
    lambda n: 0 < n.max().item() < 5,
    lambda n: {n.max().item(): 1}.get(5),
]


class Asks(nn.Module):
    """Looks at whole numbers in split code."""

    def __init__(self, question: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.a, self.b, self.question = nn.Linear(4, 4), nn.Linear(4, 4), question

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        x = self.a(x)
        return self.b(x * 3 if self.question(numbers) else x)


def split(question: Callable[[Tensor], object]) -> tuple[Asks, Pipe]:
    model = Asks(question)
    call = torch.randn(2, 4), torch.tensor([1, 4])
    return model, pipeline(model, call, split_spec={"b": SplitPoint.BEGINNING}, check=False)


@pytest.mark.parametrize("question", QUESTIONS)
def test_numbers_that_get_the_same_answer_are_taken(question: Callable[[Tensor], object]) -> None:
    # The stage compared the number itself: `assert lengths.max().item() <= length` fixed lengths.
    model, pipe = split(question)
    traced = question(torch.tensor([1, 4]))

    for numbers in ([1, 1], [1, 4], [4, 2], [1, 5], [1, 6], [1, 1, 4], [1, 1, 9], [4]):
        given = torch.randn(len(numbers), 4), torch.tensor(numbers)
        if question(given[1]) == traced:
            torch.testing.assert_close(pipe(*given), model(*given))
        else:
            with pytest.raises(InputError, match=f"gave {traced}; these inputs give {not traced}"):
                pipe(*given)


@pytest.mark.parametrize("question", OF_THE_NUMBER)
def test_numbers_that_are_used_otherwise_are_compared(
    question: Callable[[Tensor], object],
) -> None:
    model, pipe = split(question)
    x = torch.randn(2, 4)

    numbers = torch.tensor([4, 1])
    torch.testing.assert_close(pipe(x, numbers), model(x, numbers))
    with pytest.raises(InputError, match="gave 4; these inputs give 3"):
        pipe(x, torch.tensor([1, 3]))
